"""The table of attention variants: the module of each kind of spec."""

from collections.abc import Callable
from typing import Any

from kvfold.attention.base import Attention, LayerContext
from kvfold.attention.grouped import GroupedAttention
from kvfold.attention.latent import LatentAttention
from kvfold.attention.spec import AttentionSpec
from kvfold.attention.tied import TiedAttention
from kvfold.registry import lookup

MODULES: dict[str, Callable[[Any, LayerContext], Attention]] = {
    "grouped": GroupedAttention,
    "tied": TiedAttention,
    "latent": LatentAttention,
}


def build_attention(spec: AttentionSpec, context: LayerContext) -> Attention:
    """The attention module that `spec` describes, for the layer that `context` describes."""
    return lookup(MODULES, spec.kind, "attention kind")(spec, context)
