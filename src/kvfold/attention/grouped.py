"""MHA, GQA and MQA (arXiv 1706.03762, 2305.13245, 1911.02150): keys and values cached as they are."""

from torch import Tensor, nn

from kvfold.attention.base import Attention, LayerContext, split_heads
from kvfold.attention.kernels import Mask
from kvfold.attention.rotary import rotate
from kvfold.attention.spec import GroupedSpec


class GroupedAttention(Attention[GroupedSpec]):
    """`q_n . RoPE(k_g)` over cached rotated keys and values, query heads in G consecutive groups."""

    def __init__(self, spec: GroupedSpec, context: LayerContext) -> None:
        super().__init__(spec, context)
        wide, narrow = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, wide, bias=spec.query_bias)
        self.k_proj = nn.Linear(spec.hidden_size, narrow, bias=spec.key_bias)
        self.v_proj = nn.Linear(spec.hidden_size, narrow, bias=spec.value_bias)

    def project_queries(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(split_heads(self.q_proj(hidden_BTD), self.spec.num_attention_heads), cos, sin)

    def project_cached(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (split_heads(p(hidden_BTD), self.spec.num_key_value_heads) for p in (self.k_proj, self.v_proj))
        return rotate(key, cos, sin), value

    def expand(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first, second

    def attend_absorbed(self, query_BNTd: Tensor, first: Tensor, second: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        raise AssertionError("grouped attention has no absorbed path: its spec never chooses one")
