"""Compare an export in each runtime with the model that it was made from."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.doctor.probe import PROBES, Settings, run_probe
from kvfold.errors import OptionError
from kvfold.export import RUNTIMES, check_installed, read_facts, runtime_of
from kvfold.modeling import KvfoldConfig, load_model
from kvfold.progress import Progress, silent
from kvfold.texts import EVALUATION, read_text, token_ids

PROMPT, DECODED, PLACES, TOP = 256, 32, 8, 10
CELLS = 4096
"""So many tokens of cache make the size that a runtime's log tells precise."""
TOKENISED = 100_000
"""Characters of the text whose token ids are compared."""
ROUNDED = {"bf16": 0.1, "bfloat16": 0.1, "f16": 0.02, "q8_0": 0.2}
"""Tolerances where weights are rounded, in nats: of the mean over the positions, for single ones are far off then."""
SIZE_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one runtime did with one way to run it. Differences are the largest of log-probabilities, in nats.

    Args:
        problem: why it gave no answer; the numbers are then None.
        rounded: whether the weights are, so that the mean counts and not the largest difference.
        prefill: largest difference at positions of the prompt, computed at once.
        decode: largest difference at tokens computed one by one with the cache.
        mean: of the largest differences at all these positions.
        same_most_likely: share of these positions at which the most likely token is the same.
        cached_elements: per token and layer, as the runtime tells.
        same_tokens: whether its tokenizer gives the same ids.
    """

    runtime: str
    settings: str
    advised: bool
    tolerance: float
    expected_elements: int
    rounded: bool = False
    version: str | None = None
    problem: str | None = None
    prefill: float | None = None
    decode: float | None = None
    mean: float | None = None
    same_most_likely: float | None = None
    cached_elements: float | None = None
    same_tokens: bool | None = None

    @property
    def passed(self) -> bool:
        return self.verdict == "the same"

    @property
    def verdict(self) -> str:
        """In words; `passed` is that all is the same."""
        if self.problem is not None or self.prefill is None or self.decode is None or self.mean is None:
            return self.problem or "no answer"
        difference = self.mean if self.rounded else max(self.prefill, self.decode)
        # Not `>`, which a NaN passes; the mean sees one anywhere.
        if math.isnan(self.mean) or not difference <= self.tolerance:
            return "other log-probabilities"
        if not self.same_tokens:
            return "other token ids"
        if self.cached_elements is None:
            return "cache size not told"
        if abs(self.cached_elements / self.expected_elements - 1) > SIZE_TOLERANCE:
            return "other cache size"
        return "the same"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict, "passed": self.passed}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All checks of an export; it passed if those that are advised did."""

    export: str
    model: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks if check.advised)

    def to_dict(self) -> dict[str, Any]:
        checks = [check.to_dict() for check in self.checks]
        return {"export": self.export, "model": self.model, "passed": self.passed, "checks": checks}


def doctor(
    export: str | Path,
    *,
    model: str | Path | None = None,
    runtimes: Sequence[str] | None = None,
    text: str | Path | None = None,
    python: str | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Run an export in runtimes, and compare log-probabilities, token ids and cache with those of its model in fp32.

    Args:
        export: a folder or .gguf file that `export` made.
        model: folder of the model that it was made from (default: where the export says that it was).
        runtimes: names of `PROBES` (default: the one that it was made for).
        text: a text file (default: a shipped novel).
        python: interpreter of the environment in which the runtimes are installed (default: this one).
        progress: called as `Progress` says.

    Raises:
        OptionError: the export, its model or a runtime is not there.
        KvfoldError: the model or the text does not work.
    """
    path = Path(export).expanduser()
    facts = read_facts(path)
    names = _runtimes(path, runtimes, facts, python or sys.executable)
    source = model or facts.get("source")
    if source is None:
        raise OptionError(f"{path} does not say what it was made from: name that with --model.")
    content = read_text(EVALUATION if text is None else text)
    network, tokenizer = load_model(source, dtype=torch.float32)
    if not isinstance(network.config, KvfoldConfig):
        raise OptionError(f"{source} is not converted: name the conversion that was exported with --model.")
    request = _request(path, tokenizer, content)
    elements = facts.get("cached_elements") or network.config.specs()[0].cached_elements()
    rounded = ROUNDED.get(facts.get("type", ""))
    ways = [(name, way) for name in names for way in PROBES[name]]
    checks = []
    for index, (name, way) in enumerate(ways):
        progress("running", index, len(ways), f"{RUNTIMES[name].name}, {way.name}")
        answer = run_probe(name, request | {"settings": dict(way.options)}, python or sys.executable)
        checks.append(_check(name, way, answer, network, tokenizer, request, elements, rounded))
    progress("running", len(ways), len(ways))
    return Diagnosis(export=str(export), model=str(source), checks=tuple(checks))


def _runtimes(path: Path, asked: Sequence[str] | None, facts: Mapping[str, Any], python: str) -> tuple[str, ...]:
    """Those to run.

    Raises:
        OptionError: one is unknown, not installed, or does not load such a thing.
    """
    names = tuple(runtime_of(path, facts, name) for name in asked or (None,))
    for name in names:
        if name not in PROBES:
            raise OptionError(f"doctor cannot run {RUNTIMES[name].name}; it runs {', '.join(PROBES)}.")
        check_installed(RUNTIMES[name], python)
    return names


def _request(path: Path, tokenizer: PreTrainedTokenizerBase, text: str) -> dict[str, Any]:
    ids = token_ids(tokenizer, text[: 20 * (PROMPT + DECODED)], minimum=PROMPT + DECODED).tolist()
    return {
        "export": str(path.resolve()),
        "prompt": ids[:PROMPT],
        "following": ids[PROMPT : PROMPT + DECODED],
        "places": list(range(PROMPT // PLACES - 1, PROMPT, PROMPT // PLACES)),
        "decoded": DECODED,
        "top": TOP,
        "cells": CELLS,
        "text": text[:TOKENISED],
    }


def _check(
    name: str,
    way: Settings,
    answer: dict[str, Any] | str,
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    request: Mapping[str, Any],
    elements: int,
    rounded: float | None,
) -> Check:
    """One way to run it; `rounded` is the tolerance of the mean where weights are rounded."""
    ways: dict[str, Any] = {"settings": way.name, "advised": way.advised, "rounded": rounded is not None}
    ways["tolerance"] = way.tolerance if rounded is None else rounded
    if isinstance(answer, str):
        return Check(runtime=name, expected_elements=elements, problem=answer, **ways)
    with torch.no_grad():
        expected = network(torch.tensor([answer["sequence"]]), use_cache=False).logits[0].log_softmax(-1)
    found = {kind: list(_positions(answer[kind], expected)) for kind in ("prefill", "decode")}
    if not all(found.values()):
        return Check(runtime=name, expected_elements=elements, problem="told no log-probabilities", **ways)
    ids = tokenizer(request["text"], add_special_tokens=False, verbose=False).input_ids
    return Check(
        runtime=name,
        expected_elements=elements,
        version=answer["version"],
        prefill=max(difference for difference, _ in found["prefill"]),
        decode=max(difference for difference, _ in found["decode"]),
        mean=fmean(difference for kind in found.values() for difference, _ in kind),
        same_most_likely=fmean(same for kind in found.values() for _, same in kind),
        cached_elements=answer["cached_elements"],
        same_tokens=answer["token_ids"] == ids,
        **ways,
    )


def _positions(
    likeliest: Mapping[str, Mapping[str, float]], expected: Float[Tensor, "T V"]
) -> Iterator[tuple[float, bool]]:
    """At each position the largest difference, and whether the most likely token is the same."""
    for place, values in likeliest.items():
        ours = expected[int(place)]
        if not values:  # llama.cpp tells nothing of some tokens
            continue
        # What is no number comes as null.
        told = {int(token): math.nan if value is None else value for token, value in values.items()}
        differences = [abs(value - float(ours[token])) for token, value in told.items()]
        worst = math.nan if any(map(math.isnan, differences)) else max(differences)
        yield worst, max(told, key=told.__getitem__) == int(ours.argmax())
