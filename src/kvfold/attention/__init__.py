"""What an attention is: frozen specs with their costs, and the modules that carry them out."""

from kvfold.attention.base import Attention, LayerContext
from kvfold.attention.grouped import GroupedAttention
from kvfold.attention.latent import LatentAttention
from kvfold.attention.spec import AttentionSpec, GroupedSpec, LatentSpec, TiedSpec
from kvfold.attention.specs import spec_from_dict
from kvfold.attention.tied import TiedAttention
from kvfold.attention.variants import build_attention

__all__ = [
    "Attention",
    "AttentionSpec",
    "GroupedAttention",
    "GroupedSpec",
    "LatentAttention",
    "LatentSpec",
    "LayerContext",
    "TiedAttention",
    "TiedSpec",
    "build_attention",
    "spec_from_dict",
]
