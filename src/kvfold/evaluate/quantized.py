"""Quantised caches: of the original, the baseline that any smaller cache has to be held against, and of conversions."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, QuantizedCache

from kvfold.errors import OptionError
from kvfold.registry import lookup

GROUP_SIZE = 32
"""Elements that share a scale and a minimum, at most."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Codes of `bits` each, packed into bytes along the last dim, with one 16-bit scale and minimum per group.

    `dim` is the width of what was packed: the last byte and the last group may have room for more.
    """

    codes: UInt8[Tensor, "*batch bytes"]
    scale: Float[Tensor, "*batch groups 1"]
    minimum: Float[Tensor, "*batch groups 1"]
    dim: int


def pack(x: Float[Tensor, "*batch dim"], *, bits: int, group_size: int) -> Packed:
    """Asymmetric round-to-nearest quantisation of groups of up to `group_size` neighbours in the last dim.

    The groups are as few and as equal as possible: `n = ceil(dim / group_size)` of `ceil(dim / n)` elements, the last
    one perhaps shorter. A latent of 97 with groups of up to 32 has three of 25 and one of 22.

    `code = round((x - minimum) / scale)` with `scale = (maximum - minimum) / (2^bits - 1)`; scale and minimum are
    rounded to bfloat16 first, so that the codes make up for their rounding.
    """
    dim = x.shape[-1]
    # Filled up with its last value, the last group keeps its range.
    groups = _grouped_elements(x.float(), ceil(dim / group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    top = 2**bits - 1
    minimum = low.bfloat16()
    # A group of equal values has no range; any scale then stores it exactly.
    scale = ((high - minimum.float()) / top).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()
    codes = ((groups - minimum.float()) / scale.float()).round_().clamp_(0, top).to(torch.uint8).flatten(-2)
    per_byte = 8 // bits
    codes = _filled(codes[..., :dim], ceil(dim / per_byte) * per_byte)
    # A byte holds elements that are far apart, not neighbours: whole slices are shifted at once, which is much faster.
    first, *others = codes.chunk(per_byte, dim=-1)
    packed = first.clone()
    for position, part in enumerate(others, start=1):
        packed |= part << (bits * position)
    return Packed(codes=packed, scale=scale, minimum=minimum, dim=dim)


def unpack(packed: Packed, *, bits: int, dtype: torch.dtype) -> Float[Tensor, "*batch dim"]:
    """The values that `packed` stands for."""
    parts = [(packed.codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    codes = torch.cat(parts, dim=-1)[..., : packed.dim]
    groups = _grouped_elements(codes, packed.scale.shape[-2]).float()
    values = groups.mul_(packed.scale.float()).add_(packed.minimum.float()).flatten(-2)
    return values[..., : packed.dim].to(dtype)


def packed_bytes(dim: int, *, bits: int, group_size: int = GROUP_SIZE) -> int:
    """Bytes that `pack` makes of a vector of `dim` elements: codes in whole bytes, and 4 bytes for each group."""
    return ceil(dim * bits / 8) + 4 * ceil(dim / group_size)


def _grouped_elements(x: Tensor, groups: int) -> Tensor:
    """`x` (*batch, dim) as (*batch, groups, size), the last group filled up."""
    size = ceil(x.shape[-1] / groups)
    return _filled(x, groups * size).unflatten(-1, (groups, size))


def _filled(x: Tensor, width: int) -> Tensor:
    """`x` with its last element repeated until the last dim is `width`."""
    missing = width - x.shape[-1]
    return torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1) if missing else x


class GroupedLayer(DynamicLayer):
    """A cache layer that stores each token quantised once, when it arrives, and appends the packed bytes.

    transformers' own quantised layers differ in two ways that make them a poor yardstick: they requantise the whole
    history at every flush and let a token attend to unquantised neighbours of its own chunk. Here attention sees
    exactly what is stored. That is strict: with the newest 32 tokens exact, as those layers have them, the loss of int4
    all but disappears on short windows. Groups run along the last dim of each cached tensor, which may differ in width:
    keys and values of a head, or the latent and the rotary key of a converted model.
    """

    is_croppable = False

    def __init__(self, *, bits: int, group_size: int) -> None:
        super().__init__()
        self.bits, self.group_size = bits, group_size
        self.seen = 0
        self._quantized_keys: tuple[Tensor, dict[str, Any]] | None = None
        self._quantized_values: tuple[Tensor, dict[str, Any]] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (batch, heads, tokens, dim); return all of them as stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen += key_states.shape[-2]
        self._quantized_keys, keys = self._append(self._quantized_keys, key_states)
        self._quantized_values, values = self._append(self._quantized_values, value_states)
        return keys, values

    def _append(
        self, stored: tuple[Tensor, dict[str, Any]] | None, states: Tensor
    ) -> tuple[tuple[Tensor, dict[str, Any]], Tensor]:
        new = pack(states, bits=self.bits, group_size=self.group_size)
        codes, scale, minimum = new.codes, new.scale, new.minimum
        if stored is not None:
            codes = torch.cat([stored[0], codes], dim=-2)
            scale = torch.cat([stored[1]["scale"], scale], dim=-3)
            minimum = torch.cat([stored[1]["minimum"], minimum], dim=-3)
        held = Packed(codes=codes, scale=scale, minimum=minimum, dim=new.dim)
        values = unpack(held, bits=self.bits, dtype=states.dtype)
        return (codes, {"scale": scale, "minimum": minimum, "shape": values.shape}), values

    def get_seq_length(self) -> int:
        return self.seen

    def reset(self) -> None:
        super().reset()
        self.seen = 0
        self._quantized_keys = self._quantized_values = None


def quantized_cache_factory(
    config: PreTrainedConfig, *, backend: str = "grouped", nbits: int = 4, q_group_size: int = GROUP_SIZE
) -> Callable[[], Cache]:
    """A function that makes empty caches storing what a model caches in `nbits` bits, in groups along the last dim.

    With a 16-bit scale and minimum per group of 32, an element takes 5 bits at int4 (31.25 % of bf16) and 9 at int8
    (56.25 %).

    Args:
        config: of the model that the cache is for, original or converted.
        backend: `grouped` (kvfold's own, the default), or transformers' `hqq` or `quanto`, which keep scales in the
            dtype of the model (6 bits per element for a float32 one) and need the extra `quant`.
        nbits: 2, 4 or 8 (`hqq` also 1 and 3, `quanto` not 8).
        q_group_size: elements that share a scale; with the other backends it should divide the widths.

    Raises:
        OptionError: a size that does not fit the backend, or its package is missing.
        UnknownNameError: no such backend.
    """
    if q_group_size < 1:
        raise OptionError(f"q_group_size must be at least 1, not {q_group_size}.")
    return lookup(BACKENDS, backend, "quantised cache backend")(config, nbits, q_group_size)


def _grouped(config: PreTrainedConfig, nbits: int, group_size: int) -> Callable[[], Cache]:
    _check_bits("grouped", nbits, (2, 4, 8))
    layers = config.get_text_config(decoder=True).num_hidden_layers
    return lambda: Cache(layers=[GroupedLayer(bits=nbits, group_size=group_size) for _ in range(layers)])


def _hqq(config: PreTrainedConfig, nbits: int, group_size: int) -> Callable[[], Cache]:
    _check_bits("hqq", nbits, (1, 2, 3, 4, 8))
    _require("hqq", "hqq")
    return lambda: QuantizedCache(
        "hqq", config, nbits=nbits, axis_key=1, axis_value=1, q_group_size=group_size, residual_length=0
    )


def _quanto(config: PreTrainedConfig, nbits: int, group_size: int) -> Callable[[], Cache]:
    _check_bits("quanto", nbits, (2, 4))
    _require("optimum", "quanto")
    return lambda: QuantizedCache(
        "quanto", config, nbits=nbits, axis_key=0, axis_value=0, q_group_size=group_size, residual_length=0
    )


BACKENDS: dict[str, Callable[[PreTrainedConfig, int, int], Callable[[], Cache]]] = {
    "grouped": _grouped,
    "hqq": _hqq,
    "quanto": _quanto,
}


def _check_bits(backend: str, nbits: int, known: tuple[int, ...]) -> None:
    if nbits not in known:
        raise OptionError(f"the {backend} cache stores {', '.join(map(str, known))} bits, not {nbits}.")


def _require(package: str, backend: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise OptionError(f"the {backend} cache needs a package that is missing: pip install 'kvfold[quant]'.")
