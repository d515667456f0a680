"""Two ways to attend: over full keys and values through transformers' attention interface, or over the cached tensors
themselves with the scores split into a content and a rotary part."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Mask = Float[Tensor, "#B #N T S"] | Bool[Tensor, "#B #N T S"] | None


def full_attention(
    module: nn.Module,
    query_BNTd: Float[Tensor, "B N T qk"],
    key_BGSd: Float[Tensor, "B G S qk"],
    value_BGSv: Float[Tensor, "B G S v"],
    mask: Tensor | None,
    *,
    implementation: str,
    scaling: float,
    dropout: float,
    **kwargs,
) -> tuple[Float[Tensor, "B T N v"], Tensor | None]:
    """Attention through the interface that transformers has under `implementation` (eager, sdpa, flash, ...).

    Fused kernels refuse different query/key and value widths (on CPU they fall back to a path about three times as
    slow), so the narrower side is padded with zeros, which changes neither scores nor sums.
    """
    interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
    width = value_BGSv.shape[-1]
    if implementation != "eager":
        common = max(query_BNTd.shape[-1], width)
        query_BNTd, key_BGSd, value_BGSv = (_pad(x, common) for x in (query_BNTd, key_BGSd, value_BGSv))
    output, weights = interface(
        module, query_BNTd, key_BGSd, value_BGSv, mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output[..., :width], weights


def _pad(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def eager_attention(
    module: nn.Module,
    query_BNTd: Tensor,
    key_BGSd: Tensor,
    value_BGSv: Tensor,
    attention_mask: Mask,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Float[Tensor, "B T N v"], Float[Tensor, "B N T S"]]:
    """Plain matrix products, with the attention weights as second result; the interface's `eager` entry."""
    groups = query_BNTd.shape[1] // key_BGSd.shape[1]
    scores = query_BNTd @ key_BGSd.repeat_interleave(groups, dim=1).transpose(-1, -2) * scaling
    weights = F.dropout(masked_softmax(scores, attention_mask), p=dropout, training=module.training)
    output = weights @ value_BGSv.repeat_interleave(groups, dim=1)
    return output.transpose(1, 2).contiguous(), weights


def masked_softmax(scores_BNTS: Float[Tensor, "B N T S"], mask: Mask) -> Float[Tensor, "B N T S"]:
    """Softmax in fp32 or better under a boolean mask (True attends), an additive one, or, with None, a causal one.

    Without a mask the queries are the last T of the S tokens.
    """
    new, cached = scores_BNTS.shape[-2:]
    if mask is None and new > 1:
        mask = torch.ones(new, cached, dtype=torch.bool, device=scores_BNTS.device).tril(cached - new)
    if mask is not None:
        # The lowest finite number, not -inf: a row of padding sees nothing, and must not become NaN.
        lowest = torch.finfo(scores_BNTS.dtype).min
        scores_BNTS = scores_BNTS.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores_BNTS + mask
    precise = torch.promote_types(scores_BNTS.dtype, torch.float32)
    return F.softmax(scores_BNTS, dim=-1, dtype=precise).to(scores_BNTS.dtype)


def split_attention(
    content_query: Float[Tensor, "B N T c"] | None,
    content_key: Float[Tensor, "B Hc S c"],
    rotary_query: Float[Tensor, "B N T r"],
    rotary_key: Float[Tensor, "B Hr S r"],
    value: Float[Tensor, "B Hv S v"],
    mask: Mask,
    *,
    scaling: float,
) -> tuple[Float[Tensor, "B N T v"], Float[Tensor, "B N T S"]]:
    """Attend with scores `content + rotary`, straight from the cached tensors: nothing is expanded, repeated or copied.

    Query heads that share a cached head are folded into its rows, so each cached tensor is read once per product.
    """
    scores = _grouped(rotary_query, rotary_key.transpose(-1, -2))
    if content_query is not None:
        scores = scores + _grouped(content_query, content_key.transpose(-1, -2))
    weights = masked_softmax(scores * scaling, mask)
    return _grouped(weights, value), weights


def _grouped(left_BNTx: Tensor, right_Bhxy: Tensor) -> Tensor:
    """(B, N, T, x) times (B, h, x, y) to (B, N, T, y), where N / h consecutive heads share one right-hand side."""
    batch, heads, new, width = left_BNTx.shape
    rows = left_BNTx.reshape(batch, right_Bhxy.shape[1], -1, width)
    return (rows @ right_Bhxy).view(batch, heads, new, right_Bhxy.shape[-1])
