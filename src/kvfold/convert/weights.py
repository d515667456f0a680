"""One layer's attention weights as a method sees them: split by head, in fp64 or, for wide models, fp32."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvfold.attention import GroupedSpec
from kvfold.checkpoint import Checkpoint
from kvfold.families import Family


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Projections of one grouped-attention layer.

    Rotary pair l of a head is its rows l and l + P (HF's half layout). `rope_gain` is the square of the factor that the
    base model's rope scaling puts on cos and sin (yarn, longrope): a pair that loses its rotation must keep that gain.
    """

    spec: GroupedSpec
    query: Float[Tensor, "N d D"]
    key: Float[Tensor, "G d D"]
    value: Float[Tensor, "G d D"]
    output: Float[Tensor, "D Nd"]
    query_bias: Float[Tensor, "N d"] | None = None
    key_bias: Float[Tensor, "G d"] | None = None
    value_bias: Float[Tensor, "G d"] | None = None
    output_bias: Float[Tensor, " D"] | None = None
    rope_gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RotarySplit:
    """A layer's queries and keys, divided into what keeps its rotation and what does not.

    Scores are `sum over slots of RoPE(q_rope) . RoPE(k_rope) + q_nope . k_nope`, with the softmax scale of a head as
    wide as both parts; each rotary slot uses the base frequency in `index`. The bias of the NoPE keys is gone: it adds
    the same number to every score of a query, which a softmax ignores.
    """

    index: Int[Tensor, "r p"]
    query_rope: Float[Tensor, "N 2*p D"]
    query_nope: Float[Tensor, "N n D"]
    key_rope: Float[Tensor, "r 2*p D"]
    key_nope: Float[Tensor, "G n D"]
    query_rope_bias: Float[Tensor, "N 2*p"] | None = None
    query_nope_bias: Float[Tensor, "N n"] | None = None
    key_rope_bias: Float[Tensor, "r 2*p"] | None = None


def precision(spec: GroupedSpec) -> torch.dtype:
    """What a layer is computed in: fp64; beyond a width of 2048 fp32, which takes half the memory and is still far
    finer than the bf16 that such weights are stored in."""
    return torch.float64 if spec.hidden_size <= 2048 else torch.float32


def read_layer(checkpoint: Checkpoint, family: Family, spec: GroupedSpec, layer: int, rotary: Any) -> LayerWeights:
    """Read one layer's attention, tensor by tensor. `rotary` is the base model's module that makes `cos, sin`.

    Raises:
        CheckpointError: a tensor is missing or damaged, or its shape contradicts the config.
    """
    prefix, kind = family.prefix(layer), precision(spec)
    heads = {family.query: spec.num_attention_heads, family.key: spec.num_key_value_heads}
    heads[family.value] = spec.num_key_value_heads

    def weight(name: str) -> Tensor:
        return checkpoint.read(f"{prefix}{name}.weight").to(kind).unflatten(0, (heads[name], spec.head_dim))

    def bias(name: str, present: bool) -> Tensor | None:
        if not present:
            return None
        return checkpoint.read(f"{prefix}{name}.bias").to(kind).unflatten(0, (heads[name], spec.head_dim))

    output_bias = checkpoint.read(f"{prefix}{family.output}.bias").to(kind) if spec.output_bias else None
    return LayerWeights(
        spec=spec,
        query=weight(family.query),
        key=weight(family.key),
        value=weight(family.value),
        output=checkpoint.read(f"{prefix}{family.output}.weight").to(kind),
        query_bias=bias(family.query, spec.query_bias),
        key_bias=bias(family.key, spec.key_bias),
        value_bias=bias(family.value, spec.value_bias),
        output_bias=output_bias,
        rope_gain=rotary.attention_scaling**2,
    )


def expected_shapes(family: Family, spec: GroupedSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Shape of every attention tensor that the config promises for a layer, by name."""
    prefix = family.prefix(layer)
    wide, narrow = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    rows = {family.query: wide, family.key: narrow, family.value: narrow}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": (n, spec.hidden_size) for name, n in rows.items()}
    shapes[f"{prefix}{family.output}.weight"] = (spec.hidden_size, wide)
    biased = {family.query: spec.query_bias, family.key: spec.key_bias, family.value: spec.value_bias}
    shapes |= {f"{prefix}{name}.bias": (rows[name],) for name, present in biased.items() if present}
    return shapes | ({f"{prefix}{family.output}.bias": (spec.hidden_size,)} if spec.output_bias else {})
