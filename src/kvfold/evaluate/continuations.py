"""Log-likelihoods of several continuations of each context, every context computed once."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvfold.errors import TextError
from kvfold.evaluate.cache import forward_cached
from kvfold.evaluate.perplexity import LOGITS_BYTES
from kvfold.texts import check_vocabulary

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """How a model likes a continuation: the sum of its tokens' log-probabilities in nats, and whether each of them is
    the likeliest at its place."""

    log_likelihood: float
    is_greedy: bool


@dataclass(frozen=True)
class _Branches:
    """One context and all that is asked to follow it."""

    context: Tokens
    continuations: tuple[Tokens, ...]


@torch.no_grad()
def score_continuations(
    model: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> list[Continuation]:
    """Score each (context, continuation) of `pairs`, given as token ids, neither of them empty.

    The answers to a multiple-choice question share its context, which goes through the model once: the answers then
    continue from its cache, and those of one token need no further pass. Contexts that share a batch have equally many
    tokens, so nothing is padded that a later token can see.

    Args:
        model: a causal language model.
        pairs: token ids; a context that leaves no room for its continuation loses its first tokens.
        max_length: tokens that the model takes at most.
        batch: continuations per forward pass.
        progress: called as `progress(pairs done, pairs in all)`.

    Raises:
        TextError: a continuation is longer than `max_length`.
        CheckpointError: a token has no embedding.
    """
    keys = [_fitted(tuple(context), tuple(continuation), max_length) for context, continuation in pairs]
    if not keys:
        return []
    highest = max(max(context + continuation) for context, continuation in keys)
    check_vocabulary(torch.tensor([highest]), model.config.get_text_config(decoder=True).vocab_size)
    scores: dict[tuple[Tokens, Tokens], Continuation] = {}
    done = 0
    for branches in _batches(keys, batch):
        for context, continuation, score in _score(model, branches, batch):
            scores[context, continuation] = score
            done += 1
        if progress is not None:
            # Pairs that occur twice are scored once; the count is brought into line at the end.
            progress(done, len(keys))
    if progress is not None:
        progress(len(keys), len(keys))
    return [scores[key] for key in keys]


def _fitted(context: Tokens, continuation: Tokens, max_length: int) -> tuple[Tokens, Tokens]:
    assert context and continuation
    if len(continuation) > max_length:
        raise TextError(
            f"a continuation has {len(continuation)} tokens, but the model takes {max_length} at most: leave it out."
        )
    # The last token is only predicted, it does not go through the model.
    return context[-(max_length + 1 - len(continuation)) :], continuation


def _batches(keys: Iterable[tuple[Tokens, Tokens]], batch: int) -> Iterator[list[_Branches]]:
    """Contexts of one length whose continuations number `batch` at most, or a single context; the longest first, so
    that the time left is rather over- than underestimated."""
    grouped: dict[Tokens, dict[Tokens, None]] = {}
    for context, continuation in keys:
        grouped.setdefault(context, {})[continuation] = None
    ordered = sorted(grouped, key=lambda context: (-len(context), context))
    for _, contexts in groupby(ordered, key=len):
        taken: list[_Branches] = []
        for context in contexts:
            branch = _Branches(context, tuple(grouped[context]))
            if taken and sum(len(other.continuations) for other in [*taken, branch]) > batch:
                yield taken
                taken = []
            taken.append(branch)
        yield taken


def _score(model: Any, branches: list[_Branches], batch: int) -> Iterator[tuple[Tokens, Tokens, Continuation]]:
    contexts = torch.tensor([branch.context for branch in branches], device=model.device)
    cache = DynamicCache(config=model.config)
    first = forward_cached(model, contexts, cache, logits_to_keep=1).logits[:, -1]
    rows = [(row, tokens) for row, branch in enumerate(branches) for tokens in branch.continuations]
    short = [(row, tokens) for row, tokens in rows if len(tokens) == 1]
    # Similar lengths go together, as the shorter ones are padded.
    long = sorted((entry for entry in rows if len(entry[1]) > 1), key=lambda entry: len(entry[1]))
    for row, tokens in short:
        yield branches[row].context, tokens, _read_off(first[row : row + 1], tokens)
    for part in _parts(model, long, batch):
        later = _continue(model, cache, part)
        for (row, tokens), logits in zip(part, later, strict=True):
            logits = torch.cat((first[row : row + 1], logits[: len(tokens) - 1]))
            yield branches[row].context, tokens, _read_off(logits, tokens)


def _parts(model: Any, rows: list[tuple[int, Tokens]], batch: int) -> Iterator[list[tuple[int, Tokens]]]:
    """`rows` in runs of at most `batch` whose logits take no more than `LOGITS_BYTES`."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    part: list[tuple[int, Tokens]] = []
    for row in rows:
        logits = (len(part) + 1) * len(row[1]) * vocabulary * model.dtype.itemsize
        if part and (len(part) == batch or logits > LOGITS_BYTES):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _continue(model: Any, cache: Cache, part: list[tuple[int, Tokens]]) -> Tensor:
    """Logits (rows, longest - 1, vocabulary) after each token of the continuations but the last."""
    longest = max(len(tokens) for _, tokens in part) - 1
    padded = [[*tokens[:-1], *(0,) * (longest - len(tokens) + 1)] for _, tokens in part]
    branch = copy.deepcopy(cache)  # a later part starts from the same contexts
    branch.batch_select_indices(torch.tensor([row for row, _ in part], device=model.device))
    return forward_cached(model, torch.tensor(padded, device=model.device), branch).logits


def _read_off(logits: Tensor, tokens: Tokens) -> Continuation:
    """The score of `tokens`, given the logits (tokens, vocabulary) before each of them."""
    targets = torch.tensor(tokens, device=logits.device)
    nats = F.cross_entropy(logits.float(), targets, reduction="sum").item()
    return Continuation(log_likelihood=-nats, is_greedy=bool((logits.argmax(-1) == targets).all()))
