"""What each cache budget would cost: measured once per layer, predicted for every budget."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.attention import LatentSpec
from kvfold.checkpoint import open_checkpoint
from kvfold.convert import (
    ConvertOptions,
    Plan,
    Profile,
    calibration_ids,
    plan_per_layer,
    prepare,
    probe_ids,
    profile_checkpoint,
)
from kvfold.errors import OptionError
from kvfold.evaluate.perplexity import perplexity
from kvfold.evaluate.quantized import packed_bytes, quantized_cache_factory
from kvfold.modeling import load_model
from kvfold.progress import Progress

BASE_RATIO = 0.25
"""The budget that is tried; the others are predicted from it, so it lies in the middle of those that are usual."""
TOKENS = 8192
BF16_BYTES = 2
"""Caches are compared as they would be used, whatever the dtype of the checkpoint."""
NAME = "kvfold mixed"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One budget with one kind of cache. Bytes are per token over all layers, scales of quantised caches included."""

    name: str
    cache: str
    cache_ratio: float | None
    bytes_per_token: int
    qk_rope_head_dim: int | None
    kv_lora_rank: float | None
    predicted_perplexity: float | None
    perplexity: float | None


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """Perplexity on a short text against cache bytes: of the original (measured) and of conversions (predicted)."""

    model: str
    text: dict[str, Any]
    original: dict[str, float]
    points: tuple[Point, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tradeoff(model: str | Path, *, ratios: Sequence[float], progress: Progress, **options: Any) -> Tradeoff:
    """Predict the one-shot perplexity of converting `model` at each cache ratio, without converting it.

    One pass over the model on 8,192 calibration tokens folds every layer at a quarter of the cache and measures what
    each costs, alone and together. Another ratio scales that by the energy of the rotary components and of the ranks
    that it leaves out (see docs/METHODS.md). int8 and int4 caches of the original are measured, those of a conversion
    predicted: the nats of both add up.

    Raises:
        KvfoldError: as `convert` does.
        OptionError: the rope strategy or the factorisation has no prediction.
    """
    chosen = ConvertOptions.from_dict({"calibration_tokens": TOKENS} | options | {"cache_ratio": BASE_RATIO})
    if chosen.rope_strategy != "mixed" or chosen.factorization != "attention_aware":
        raise OptionError("only the rope strategy mixed with the factorization attention_aware can be predicted.")
    checkpoint = open_checkpoint(model)
    family, plan = prepare(checkpoint, chosen)
    tokenizer = checkpoint.load_tokenizer()
    ids = calibration_ids(checkpoint.path, tokenizer, chosen, progress)
    profile = profile_checkpoint(checkpoint, family, tokenizer, ids, plan, chosen, progress)
    network, _ = load_model(model, dtype=torch.float32)
    probes = probe_ids(tokenizer, ids.shape[1])
    source = plan.layers[0].source
    original = {"bytes_per_token": plan.elements_before * BF16_BYTES, "perplexity": math.exp(profile.original)}
    points, lost = [], {}
    for bits in (8, 4):
        lost[bits] = _quantised_loss(network, probes, bits) - profile.original
        nbytes = 2 * source.num_key_value_heads * packed_bytes(source.head_dim, bits=bits) * len(plan.layers)
        points.append(
            Point(
                name="original",
                cache=f"int{bits}",
                cache_ratio=None,
                bytes_per_token=nbytes,
                qk_rope_head_dim=None,
                kv_lora_rank=None,
                predicted_perplexity=None,
                perplexity=math.exp(profile.original + lost[bits]),
            )
        )
        progress("measuring quantised caches of the original", len(points), 2)
    for ratio in ratios:
        _, other = prepare(checkpoint, ConvertOptions.from_dict(chosen.to_dict() | {"cache_ratio": ratio}))
        if chosen.per_layer:
            other = plan_per_layer(other, profile)
        points += _predicted(profile, other, ratio, {16: 0.0} | lost)
    return Tradeoff(
        model=checkpoint.source,
        text={"name": "the shipped novel", "windows": len(probes), "context": probes.shape[1]},
        original=original,
        points=tuple(points),
    )


def _quantised_loss(network: Any, probes: Tensor, bits: int) -> float:
    factory = quantized_cache_factory(network.config, nbits=bits)
    score = perplexity(network, probes.flatten(), context=probes.shape[1], cache_factory=factory)
    return score.nats_per_token


def _predicted(profile: Profile, plan: Plan, ratio: float, lost: dict[int, float]) -> list[Point]:
    """The points of one ratio: the conversion in bf16, int8 and int4."""
    targets = [layer.target for layer in plan.layers]
    rope_dim, ranks = targets[0].qk_rope_head_dim, [target.kv_lora_rank for target in targets]
    nats = profile.original + profile.predict(rope_dim, ranks)
    return [
        Point(
            name=NAME,
            cache="bfloat16" if bits == 16 else f"int{bits}",
            cache_ratio=ratio,
            bytes_per_token=sum(_bytes(target, bits) for target in targets),
            qk_rope_head_dim=rope_dim,
            kv_lora_rank=sum(ranks) / len(ranks),
            predicted_perplexity=math.exp(min(nats + extra, 700.0)),
            perplexity=None,
        )
        for bits, extra in lost.items()
    ]


def _bytes(target: LatentSpec, bits: int) -> int:
    """Bytes of one token in one layer."""
    widths = (target.kv_lora_rank, *[target.qk_rope_head_dim] * target.rotary_heads)
    return sum(BF16_BYTES * width if bits == 16 else packed_bytes(width, bits=bits) for width in widths)
