"""Quantised caches of the original model: the baseline that any smaller cache has to be held against."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, QuantizedCache

from kvfold.errors import OptionError
from kvfold.registry import lookup


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Codes of `bits` each, packed into bytes along the last dim, with one 16-bit scale and minimum per group."""

    codes: UInt8[Tensor, "*batch bytes"]
    scale: Float[Tensor, "*batch groups 1"]
    minimum: Float[Tensor, "*batch groups 1"]


def pack(x: Float[Tensor, "*batch dim"], *, bits: int, group_size: int) -> Packed:
    """Asymmetric round-to-nearest quantisation of groups of `group_size` neighbours in the last dim.

    `code = round((x - minimum) / scale)` with `scale = (maximum - minimum) / (2^bits - 1)`; scale and minimum are
    rounded to bfloat16 first, so that the codes make up for their rounding.
    """
    groups = x.float().unflatten(-1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    top = 2**bits - 1
    minimum = low.bfloat16()
    # A group of equal values has no range; any scale then stores it exactly.
    scale = ((high - minimum.float()) / top).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()
    codes = ((groups - minimum.float()) / scale.float()).round_().clamp_(0, top).to(torch.uint8).flatten(-2)
    # A byte holds elements that are far apart, not neighbours: whole slices are shifted at once, which is much faster.
    first, *others = codes.chunk(8 // bits, dim=-1)
    packed = first.clone()
    for position, part in enumerate(others, start=1):
        packed |= part << (bits * position)
    return Packed(codes=packed, scale=scale, minimum=minimum)


def unpack(packed: Packed, *, bits: int, dtype: torch.dtype) -> Float[Tensor, "*batch dim"]:
    """The values that `packed` stands for."""
    parts = [(packed.codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    groups = torch.cat(parts, dim=-1).unflatten(-1, (packed.scale.shape[-2], -1)).float()
    return groups.mul_(packed.scale.float()).add_(packed.minimum.float()).flatten(-2).to(dtype)


class GroupedLayer(DynamicLayer):
    """A cache layer that stores each token quantised once, when it arrives, and appends the packed bytes.

    transformers' own quantised layers differ in two ways that make them a poor yardstick: they requantise the whole
    history at every flush and let a token attend to unquantised neighbours of its own chunk. Here attention sees
    exactly what is stored. That is strict: with the newest 32 tokens exact, as those layers have them, the loss of int4
    all but disappears on short windows. Groups run along the head dim, of the largest size up to `group_size` that
    divides it.
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
        dim = states.shape[-1]
        if dim % (8 // self.bits):
            raise OptionError(f"a head dim of {dim} cannot be packed at {self.bits} bits into whole bytes: use 8 bits.")
        size = max(size for size in range(1, min(self.group_size, dim) + 1) if dim % size == 0)
        new = pack(states, bits=self.bits, group_size=size)
        codes, scale, minimum = new.codes, new.scale, new.minimum
        if stored is not None:
            codes = torch.cat([stored[0], codes], dim=-2)
            scale = torch.cat([stored[1]["scale"], scale], dim=-3)
            minimum = torch.cat([stored[1]["minimum"], minimum], dim=-3)
        values = unpack(Packed(codes=codes, scale=scale, minimum=minimum), bits=self.bits, dtype=states.dtype)
        return (codes, {"scale": scale, "minimum": minimum, "shape": values.shape}), values

    def get_seq_length(self) -> int:
        return self.seen

    def reset(self) -> None:
        super().reset()
        self.seen = 0
        self._quantized_keys = self._quantized_values = None


def quantized_cache_factory(
    config: PreTrainedConfig, *, backend: str = "grouped", nbits: int = 4, q_group_size: int = 32
) -> Callable[[], Cache]:
    """A function that makes empty caches storing keys and values in `nbits` bits, in groups along the head dim.

    With int4 codes and a 16-bit scale and minimum per group of 32, an element takes 5 bits: 31.25 % of bf16.

    Args:
        config: of the model that the cache is for.
        backend: `grouped` (kvfold's own, the default), or transformers' `hqq` or `quanto`, which keep scales in the
            dtype of the model (6 bits per element for a float32 one) and need the extra `quant`.
        nbits: 2, 4 or 8 (`hqq` also 1 and 3, `quanto` not 8).
        q_group_size: elements that share a scale.

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
