import importlib
from itertools import pairwise

import pytest
import torch

from kvfold import KvfoldConfig, KvfoldForCausalLM
from kvfold.attention import LatentSpec
from kvfold.errors import CheckpointError, TextError
from kvfold.evaluate.continuations import score_continuations

module = importlib.import_module("kvfold.evaluate.continuations")
LONG = 64


@pytest.fixture
def converted(llama, randomise):
    """The latent model that a conversion of `llama` could give."""
    config = llama.config
    spec = LatentSpec(
        hidden_size=config.hidden_size,
        num_attention_heads=4,
        num_key_value_heads=2,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    return randomise(KvfoldForCausalLM(KvfoldConfig(text_config=config.to_dict(), attention=spec.to_dict())))


@pytest.fixture
def pairs():
    """Contexts of 1 to 24 tokens (beyond mistral's window), each with continuations of 1 to 6; some occur twice."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count):
        return torch.randint(128, (count,), generator=generator).tolist()

    contexts = [tokens(length) for length in (5, 5, 5, 24, 1, 20)]
    found = [(context, tokens(length)) for context in contexts for length in (1, 4, 1, 6)]
    return [*found, found[0], found[1], (contexts[0] + [7], tokens(3))]


@torch.no_grad()
def naive(model, context, continuation):
    """One forward pass over all tokens for each pair."""
    logits = model(input_ids=torch.tensor([[*context, *continuation]])).logits[0].log_softmax(-1)
    steps = range(len(context), len(context) + len(continuation))
    total = sum(logits[step - 1, token].item() for step, token in zip(steps, continuation, strict=True))
    greedy = all(logits[step - 1].argmax() == token for step, token in zip(steps, continuation, strict=True))
    return total, greedy


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek", "converted"])
@pytest.mark.parametrize("batch", [1, 6, 100])
def test_scores_are_those_of_whole_passes(request, name, batch, pairs):
    model = request.getfixturevalue(name)
    scores = score_continuations(model, pairs, max_length=LONG, batch=batch)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        total, greedy = naive(model, context, continuation)
        assert score.log_likelihood == pytest.approx(total, abs=1e-4)
        assert score.is_greedy == greedy


def test_greedy_continuations_are_found(llama):
    ids = llama.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()
    wrong = [*ids[3:-1], (ids[-1] + 1) % 128]
    scores = score_continuations(llama, [(ids[:3], ids[3:]), (ids[:3], ids[3:4]), (ids[:3], wrong)], max_length=LONG)
    assert [score.is_greedy for score in scores] == [True, True, False]


def test_little_memory_for_logits(llama, pairs, monkeypatch):
    whole = score_continuations(llama, pairs, max_length=LONG)
    monkeypatch.setattr(module, "LOGITS_BYTES", 128 * 4 * 5)
    parts = score_continuations(llama, pairs, max_length=LONG)
    for one, other in zip(whole, parts, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)


def test_long_contexts_lose_their_first_tokens(llama, pairs):
    (context, continuation) = pairs[15]
    (score,) = score_continuations(llama, [(context, continuation)], max_length=12)
    total, _ = naive(llama, context[-7:], continuation)  # of 12 tokens that are fed, 5 are the continuation's
    assert score.log_likelihood == pytest.approx(total, abs=1e-4)


def test_every_context_is_computed_once(llama, monkeypatch):
    fed = []
    forward = module.forward_cached

    def recorded(model, ids, cache, **arguments):
        fed.append(tuple(ids.shape))
        return forward(model, ids, cache, **arguments)

    monkeypatch.setattr(module, "forward_cached", recorded)
    letters = [([1, 2, 3, 4], [token]) for token in (5, 6, 7, 8)]
    score_continuations(llama, letters, max_length=LONG)
    assert fed == [(1, 4)]
    fed.clear()
    score_continuations(llama, [*letters, ([4, 3, 2, 1], [9, 9, 9]), ([4, 3, 2, 1], [8, 8])], max_length=LONG)
    assert fed == [(2, 4), (2, 2)]


def test_progress_rises_to_all(llama, pairs):
    steps = []
    score_continuations(llama, pairs, max_length=LONG, batch=6, progress=lambda *step: steps.append(step))
    assert steps[-1] == (len(pairs), len(pairs))
    assert all(first[0] <= second[0] for first, second in pairwise(steps))
    assert score_continuations(llama, [], max_length=LONG) == []


def test_mistakes_are_named(llama):
    with pytest.raises(TextError, match="a continuation has 5 tokens, but the model takes 4 at most"):
        score_continuations(llama, [([1], [2] * 5)], max_length=4)
    with pytest.raises(CheckpointError, match="gives token 128, the model has 128 embeddings"):
        score_continuations(llama, [([1], [128])], max_length=4)
