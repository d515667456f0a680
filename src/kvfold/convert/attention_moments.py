"""What attention does with the calibration text: moments under the original's own attention weights, streamed.

Which rotations matter, and what values are read from, is decided by attention. So its weights a_ij are computed for
evenly spread rows i, one in `ROW_STEP`.

Letters: B windows, T tokens, I rows, N query heads, G KV heads, P pairs, D model width.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvfold.convert.weights import LayerWeights

ROW_STEP = 4


@dataclass(frozen=True, kw_only=True)
class AttentionMoments:
    """Means over rows i of the original's attention, in fp64.

    For each query head and rotary pair, with q_i, k_j before and q^_i, k^_j after rotation (2-vectors), and with
    everything centred over j under the weights a_ij:

    `bare_gram` is E[f f^T] of the features f = q_i (x) k_j, `bare_target` E[f (q^_i . k^_j)], `rotated_energy`
    E[(q^_i . k^_j)^2]. `value_moment` is E[z z^T] of z = sum_j a_ij x_j, over heads too: what values are read from.
    `distance[t]` is the share of attention that goes t tokens back.
    """

    bare_gram: Float[Tensor, "N P 4 4"]
    bare_target: Float[Tensor, "N P 4"]
    rotated_energy: Float[Tensor, "N P"]
    value_moment: Float[Tensor, "D D"]
    distance: Float[Tensor, " T"]

    def to(self, dtype: torch.dtype) -> "AttentionMoments":
        """The same numbers in another precision."""
        return AttentionMoments(**{field.name: getattr(self, field.name).to(dtype) for field in fields(self)})


class AttentionMomentsAccumulator:
    """Sums over windows, in fp64, of fp32 products.

    Args:
        cos, sin: the base model's tables for positions 0 to T - 1, both halves alike, rope scaling included.
        mask: True where a query may look; None for all before it.
    """

    def __init__(
        self,
        weights: LayerWeights,
        cos_Td: Float[Tensor, "T d"],
        sin_Td: Float[Tensor, "T d"],
        mask: Bool[Tensor, "T T"] | None,
    ) -> None:
        spec, length = weights.spec, len(cos_Td)
        heads, pairs = spec.num_attention_heads, spec.head_dim // 2
        self._spec = spec
        self._query, self._key = (weight.flatten(0, 1).float() for weight in (weights.query, weights.key))
        self._query_bias, self._key_bias = (
            None if bias is None else bias.flatten().float() for bias in (weights.query_bias, weights.key_bias)
        )
        self._cos, self._sin = cos_Td[:, :pairs].float(), sin_Td[:, :pairs].float()
        self._mask = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
        shapes = {
            "bare_gram": (heads, pairs, 4, 4),
            "bare_target": (heads, pairs, 4),
            "rotated_energy": (heads, pairs),
            "value_moment": (spec.hidden_size, spec.hidden_size),
            "distance": (length,),
        }
        self._sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._windows = self._rows = 0

    def update(self, hidden_BTD: Float[Tensor, "B T D"]) -> None:
        """Add the attention inputs of some windows."""
        for hidden_TD in hidden_BTD.float():
            self._add_window(hidden_TD)

    def finish(self) -> AttentionMoments:
        """The means of everything added so far."""
        heads = self._spec.num_attention_heads
        means = {name: total / self._rows for name, total in self._sums.items()}
        return AttentionMoments(
            **means | {name: means[name] / heads for name in ("value_moment", "distance")},
        )

    def _add_window(self, hidden_TD: Float[Tensor, "T D"]) -> None:
        spec = self._spec
        rows = torch.arange(self._windows % ROW_STEP, len(hidden_TD), ROW_STEP)
        query_NTd = self._heads(hidden_TD, self._query, self._query_bias)[:, rows]
        key_GTd = self._heads(hidden_TD, self._key, self._key_bias)
        turned_query = self._rotate(query_NTd, rows)
        turned_key = self._rotate(key_GTd, torch.arange(len(hidden_TD)))
        scores = _per_group(turned_query, turned_key.transpose(1, 2)) * spec.head_dim**-0.5
        weights_NIT = scores.masked_fill(~self._mask[rows], -torch.inf).softmax(-1)
        read_NID = weights_NIT @ hidden_TD
        self._sums["value_moment"] += torch.einsum("nid,nie->de", read_NID, read_NID).double()
        self._sums["distance"] += self._by_distance(weights_NIT.sum(0), rows)
        self._add_rotation(query_NTd, turned_query, key_GTd, turned_key, weights_NIT)
        self._windows += 1
        self._rows += len(rows)

    def _add_rotation(
        self, query: Tensor, turned_query: Tensor, key: Tensor, turned_key: Tensor, weights_NIT: Tensor
    ) -> None:
        """The normal equations of `q^ . k^ ~ q^T M k`: per row, covariances over j, then moments over rows."""
        bare, turned = (x.unflatten(-1, (2, -1)) for x in (key, turned_key))  # (G, T, part, P)
        both = torch.cat((bare, turned), dim=2)
        first, second = torch.triu_indices(4, 4)
        products = both[:, :, first] * both[:, :, second]
        features = torch.cat((both.flatten(2), products.flatten(2)), dim=2)
        means = _per_group(weights_NIT, features).unflatten(-1, (14, -1))  # (N, I, 4 means then 10 products, P)
        mean = means[:, :, :4]
        covariance = means.new_empty(*mean.shape[:3], 4, mean.shape[-1])
        covariance[:, :, first, second] = covariance[:, :, second, first] = means[:, :, 4:]
        covariance = covariance - mean[:, :, :, None] * mean[:, :, None]
        query, turned_query = (x.unflatten(-1, (2, -1)) for x in (query, turned_query))  # (N, I, part, P)
        outer = query[:, :, :, None] * query[:, :, None]
        gram = torch.einsum("niabp,nicdp->npacbd", outer, covariance[:, :, :2, :2])
        along = torch.einsum("nicdp,nidp->nicp", covariance[:, :, :, 2:], turned_query)
        target = torch.einsum("niap,nicp->npac", query, along[:, :, :2])
        self._sums["bare_gram"] += gram.flatten(4).flatten(2, 3).double()
        self._sums["bare_target"] += target.flatten(2).double()
        self._sums["rotated_energy"] += (along[:, :, 2:] * turned_query).sum((1, 2)).double()

    def _heads(self, hidden_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Float[Tensor, "h T d"]:
        flat = torch.nn.functional.linear(hidden_TD, weight, bias)
        return flat.unflatten(-1, (-1, self._spec.head_dim)).transpose(0, 1)

    def _rotate(self, x_hTd: Tensor, positions: Tensor) -> Float[Tensor, "h T d"]:
        cos, sin = self._cos[positions], self._sin[positions]
        real, imaginary = x_hTd.chunk(2, dim=-1)
        return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)

    def _by_distance(self, weights_IT: Tensor, rows: Tensor) -> Float[Tensor, " T"]:
        length = weights_IT.shape[1]
        back = (rows[:, None] - torch.arange(length)).clamp_min(0)
        return torch.zeros(length, dtype=torch.float64).index_add_(0, back.flatten(), weights_IT.flatten().double())


def _per_group(left_NIx: Tensor, right_Gxy: Tensor) -> Float[Tensor, "N I y"]:
    """Multiply every query head by the matrix of its KV head."""
    heads, rows, width = left_NIx.shape
    grouped = left_NIx.reshape(len(right_Gxy), -1, width) @ right_Gxy
    return grouped.reshape(heads, rows, -1)
