"""The one forward pass that every attention variant shares: project, rotate, cache, attend, project out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from kvfold.attention.kernels import Mask, full_attention
from kvfold.attention.rotary import select, uniform_index
from kvfold.attention.spec import AttentionSpec, Path
from kvfold.errors import OptionError

SpecT = TypeVar("SpecT", bound=AttentionSpec)


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What a layer's attention must know of the model around it.

    `config` is the base model's (its attention implementation and dropout are read at run time), `layer_idx` the key of
    this layer in the cache, `base_pairs` the frequencies in the base model's `cos, sin`, `sliding_window` the number of
    tokens that a query sees, or None for all.
    """

    config: PreTrainedConfig
    layer_idx: int
    base_pairs: int
    sliding_window: int | None = None


class Attention(nn.Module, ABC, Generic[SpecT]):
    """A drop-in for the attention module of a transformers decoder layer, with the shapes and biases of `spec`."""

    rotary_index: Tensor

    def __init__(self, spec: SpecT, context: LayerContext) -> None:
        super().__init__()
        self.spec, self.context = spec, context
        self.config, self.layer_idx = context.config, context.layer_idx
        self.is_causal = True
        self.num_key_value_groups = spec.query_groups
        # Persistent: a conversion chooses its own frequencies, so they belong to the checkpoint.
        self.register_buffer("rotary_index", uniform_index(*spec.rotary_pairs, context.base_pairs))
        self.o_proj = nn.Linear(spec.num_attention_heads * spec.v_width, spec.hidden_size, bias=spec.output_bias)
        self.path: Path | None = None  # None: the cheaper one for the lengths at hand

    @abstractmethod
    def project_queries(
        self, hidden_BTD: Float[Tensor, "B T D"], cos: Tensor, sin: Tensor
    ) -> Float[Tensor, "B N T qk"]:
        """Rotated queries, content dims before rotary dims."""

    @abstractmethod
    def project_cached(
        self, hidden_BTD: Float[Tensor, "B T D"], cos: Tensor, sin: Tensor
    ) -> tuple[Float[Tensor, "B h T c"], Float[Tensor, "B r T k"]]:
        """The two tensors that are cached, shaped as `spec.cached_shapes` says."""

    @abstractmethod
    def expand(self, first: Tensor, second: Tensor) -> tuple[Float[Tensor, "B G S qk"], Float[Tensor, "B G S v"]]:
        """Full keys and values out of the two cached tensors."""

    @abstractmethod
    def attend_absorbed(
        self, query_BNTd: Float[Tensor, "B N T qk"], first: Tensor, second: Tensor, mask: Mask
    ) -> tuple[Float[Tensor, "B T N v"], Float[Tensor, "B N T S"]]:
        """Attention on the cached tensors themselves."""

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        position_embeddings: tuple[Float[Tensor, "#B T d"], Float[Tensor, "#B T d"]],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,  # the name of `cache` before transformers 5.20
        **kwargs,
    ) -> tuple[Float[Tensor, "B T D"], Tensor | None]:
        """Attention output and, where the path computes them, the attention weights (B, N, T, S).

        Raises:
            OptionError: `output_attentions` asks the whole model for weights: transformers collects those by class.
        """
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise OptionError("output_attentions: kvfold models return no attention weights; call a layer's attention.")
        cos, sin = (select(table, self.rotary_index) for table in position_embeddings)
        query = self.project_queries(hidden_states, cos, sin)
        first, second = self.project_cached(hidden_states, cos, sin)
        store = past_key_values if cache is None else cache
        if store is not None:
            first, second = self._cached(store, first, second)
        if self._choose_path(query.shape[2], first.shape[2], attention_mask) == "absorbed":
            if attention_mask is not None and attention_mask.dim() == 2:  # flash's padding mask, one query
                attention_mask = attention_mask[:, None, None, :].bool()
            output, weights = self.attend_absorbed(query, first, second, attention_mask)
        else:
            output, weights = full_attention(
                self,
                query,
                *self.expand(first, second),
                attention_mask,
                implementation=self.config._attn_implementation or "eager",
                scaling=self.spec.softmax_scale,
                dropout=self._dropout,
                sliding_window=self.context.sliding_window,
                **kwargs,
            )
        return self.o_proj(self.merge_heads(output)), weights

    def merge_heads(self, output_BTNv: Float[Tensor, "B T N v"]) -> Float[Tensor, "B T Nv"]:
        """What all heads attended to, side by side."""
        return output_BTNv.flatten(2)

    def _cached(self, cache: Cache, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' tensors to the cache and return those of all tokens.

        A StaticCache has one head count for both, so what has fewer elements takes the heads of the other.
        """
        shapes = self.spec.cached_shapes()
        heads = common_heads(*shapes)
        stored = cache.update(regroup(first, heads), regroup(second, heads), self.layer_idx)
        return regroup(stored[0], shapes[0][0]), regroup(stored[1], shapes[1][0])

    @property
    def _dropout(self) -> float:
        return self.config.attention_dropout if self.training else 0.0

    def _choose_path(self, new_tokens: int, cached_tokens: int, mask: Tensor | None) -> Path:
        # Without an explicit mask, several queries rely on the interface's own causal rule, and a query that must not
        # see the whole cache on its sliding window; dropout lives there too.
        explicit = new_tokens == 1 or (isinstance(mask, Tensor) and mask.dim() == 4)
        window = self.context.sliding_window
        hidden = mask is None and window is not None and cached_tokens > window
        has_paths = self.spec.absorbed_flops(new_tokens, cached_tokens) is not None
        if not explicit or hidden or not has_paths or self._dropout > 0:
            return "expanded"
        return self.path or self.spec.cheaper_path(new_tokens, cached_tokens)


def split_heads(x_BTd: Float[Tensor, "B T hd"], heads: int) -> Float[Tensor, "B h T d"]:
    """(B, T, heads * d) to (B, heads, T, d)."""
    return x_BTd.unflatten(-1, (heads, -1)).transpose(1, 2)


def common_heads(first: tuple[int, int], second: tuple[int, int]) -> int:
    """The number of heads that both cached tensors, each given as (heads, width), can be laid out in.

    The larger one keeps its own, for putting a tensor back into its heads costs a copy in a batch.
    """
    heads = max(first, second, key=lambda shape: shape[0] * shape[1])[0]
    return heads if all(count * width % heads == 0 for count, width in (first, second)) else 1


def regroup(x_BhTd: Float[Tensor, "B h T d"], heads: int) -> Float[Tensor, "B heads T w"]:
    """The same elements of every token in another number of heads."""
    if x_BhTd.shape[1] == heads:
        return x_BhTd
    return split_heads(x_BhTd.transpose(1, 2).flatten(2), heads)


class LatentRMSNorm(nn.Module):
    """RMSNorm with its own weight for each latent head; input and output are (..., heads * rank)."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.heads, self.eps = heads, eps

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        per_head = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.heads, -1))
        normed = per_head * torch.rsqrt(per_head.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.flatten(-2).to(x.dtype)
