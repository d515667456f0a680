"""Prove what a conversion did: the converted model beside its original, and against itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from kvfold.attention import Attention
from kvfold.attention.spec import Path as AttentionPath
from kvfold.errors import CheckpointError
from kvfold.evaluate.cache import forward_cached, measure_cache
from kvfold.families import family_of
from kvfold.modeling import KvfoldForCausalLM, load_model
from kvfold.texts import EVALUATION, check_vocabulary, read_text, token_ids

DECODE_STEPS = 32
TOLERANCE = 1e-3
"""Relative error from which a module counts as diverging, and logit difference from which two ways to the same logits
count as different; both in fp32."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Comparisons on `tokens` tokens, in fp32. Differences are of logits; `kl` is KL(original || converted), nats per
    token.

    `first_diverging_module` is the first, in order of execution, whose output is off by more than a relative 1e-3; None
    for a lossless conversion. `module_errors` holds |converted - original| / |original| per attention and layer output.
    `passed` says whether the converted model agrees with itself (cached = uncached, absorbed = expanded) and caches
    exactly what its config promises: how far it is from the original is a matter of the budget, not of correctness.
    """

    original: str
    converted: str
    tokens: int
    max_logit_difference: float
    mean_logit_difference: float
    kl: float
    top1_agreement: float
    first_diverging_module: str | None
    module_errors: dict[str, float]
    cached_vs_uncached: float
    absorbed_vs_expanded: float
    printed_bytes_per_token: int
    measured_bytes_per_token: float
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(model: str | Path, out: str | Path, *, text: str | Path = EVALUATION, tokens: int = 256) -> Verification:
    """Compare the converted folder `out` with its original `model`; one model is in memory at a time.

    Raises:
        CheckpointError: a model cannot be loaded, `out` is not a converted model, or the two do not belong together.
        TextError: the text is missing or shorter than `tokens`.
    """
    original, tokenizer = load_model(model, torch.float32)
    ids = token_ids(tokenizer, read_text(text), minimum=tokens, name=f"the text {str(text)!r}")[None, :tokens]
    check_vocabulary(ids, original.config.vocab_size)
    if isinstance(original, KvfoldForCausalLM):
        raise CheckpointError(f"{model} is a converted model; the first argument of verify is the original.")
    reference, expected = _run(original, ids)
    shape = _shape(original.config)
    del original
    converted, _ = load_model(out, torch.float32)
    if not isinstance(converted, KvfoldForCausalLM):
        raise CheckpointError(f"{out} is not a converted model: its model type is {converted.config.model_type!r}.")
    if _shape(converted.config.text_config) != shape:
        raise CheckpointError(f"{out} was not converted from {model}: layers, width or vocabulary differ.")
    logits, outputs = _run(converted, ids)
    errors = {name: _relative_error(outputs[name], expected[name]) for name in expected}
    cached = float((_step_by_step(converted, ids) - logits).abs().max())
    absorbed = _path_difference(converted, ids)
    printed = sum(module.spec.cached_elements() for module in converted.attention_modules()) * 4
    measured = measure_cache(converted).bytes_per_token
    difference = (logits - reference).abs()
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    return Verification(
        original=str(model),
        converted=str(out),
        tokens=tokens,
        max_logit_difference=float(difference.max()),
        mean_logit_difference=float(difference.mean()),
        kl=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        top1_agreement=float((reference.argmax(-1) == logits.argmax(-1)).float().mean()),
        first_diverging_module=next((name for name, error in errors.items() if error > TOLERANCE), None),
        module_errors=errors,
        cached_vs_uncached=cached,
        absorbed_vs_expanded=absorbed,
        printed_bytes_per_token=printed,
        measured_bytes_per_token=measured,
        passed=cached < TOLERANCE and absorbed < TOLERANCE and measured == printed,
    )


def _shape(config: Any) -> tuple[int, int, int]:
    return config.num_hidden_layers, config.hidden_size, config.vocab_size


@torch.no_grad()
def _run(model: Any, ids: Int64[Tensor, "1 T"]) -> tuple[Float[Tensor, "1 T V"], dict[str, Tensor]]:
    """Logits, and the output of every attention module and layer in order of execution."""
    family = family_of(model.config.get_text_config())
    watched = {
        f"{family.layers}.{index}{part}": model.get_submodule(f"{family.layers}.{index}{part}")
        for index in range(model.config.num_hidden_layers)
        for part in (f".{family.attention}", "")
    }
    with _recorded(watched) as outputs:
        logits = model(input_ids=ids, use_cache=False).logits
    return logits, outputs


@contextmanager
def _recorded(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple, output: Any) -> None:
            outputs[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    yield outputs
    for handle in handles:
        handle.remove()


def _relative_error(value: Tensor, reference: Tensor) -> float:
    # The attention of a pruned layer gives zeros.
    return float((value - reference).norm() / reference.norm().clamp_min(torch.finfo(torch.float32).tiny))


@torch.no_grad()
def _step_by_step(model: KvfoldForCausalLM, ids: Int64[Tensor, "1 T"]) -> Float[Tensor, "1 T V"]:
    """Logits of a prefill of all but the last tokens and one decode step for each of those."""
    cache = DynamicCache(config=model.config)
    prefill = max(ids.shape[1] - DECODE_STEPS, 1)
    parts = [ids[:, :prefill], *ids[:, prefill:].split(1, dim=1)]
    return torch.cat([forward_cached(model, part, cache).logits for part in parts], dim=1)


@torch.no_grad()
def _path_difference(model: KvfoldForCausalLM, ids: Int64[Tensor, "1 T"]) -> float:
    """Largest logit difference between the two paths of attention, for the last token over the cached others."""
    logits = []
    for path in ("absorbed", "expanded"):
        cache = DynamicCache(config=model.config)
        with _forced(model.attention_modules(), path):
            forward_cached(model, ids[:, :-1], cache)
            logits.append(forward_cached(model, ids[:, -1:], cache).logits)
    return float((logits[0] - logits[1]).abs().max())


@contextmanager
def _forced(modules: list[Attention], path: AttentionPath) -> Iterator[None]:
    for module in modules:
        module.path = path
    yield
    for module in modules:
        module.path = None
