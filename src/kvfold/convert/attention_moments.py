"""What attention does with the calibration text: moments under the original's own attention weights, streamed.

Which rotations matter, and what values are read from, is decided by attention. So its weights a_ij are computed for
evenly spread rows i, one in `ROW_STEP`.

Letters: B windows, T tokens, I rows, N query heads, G KV heads, P pairs, S pairs near a rotary slot, D model width.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvfold.convert.weights import LayerWeights

ROW_STEP = 4
REACH = 2
"""How many frequencies away a pair may be rotated at another's."""
MOST_MIXED = 48
"""Of pairs of all KV heads that are considered for one slot: with many heads there is enough to choose from nearby."""


def near(heads: int, pairs: int) -> Int[Tensor, "P S"]:
    """The pairs that may be rotated at the frequency of each pair: as many on both sides, itself among them."""
    reach = min(REACH, max((MOST_MIXED // heads - 1) // 2, 0), (pairs - 1) // 2)
    first = (torch.arange(pairs) - reach).clamp(0, pairs - 1 - 2 * reach)
    return first[:, None] + torch.arange(2 * reach + 1)


@dataclass(frozen=True, kw_only=True)
class AttentionMoments:
    """Means over rows i of the original's attention, in fp64.

    For each query head and rotary pair, with q_i, k_j before and q^_i, k^_j after rotation (2-vectors), and with
    everything centred over j under the weights a_ij:

    `bare_gram` is E[f f^T] of the features f = q_i (x) k_j, `bare_target` E[f (q^_i . k^_j)], `rotated_energy`
    E[(q^_i . k^_j)^2]. `slot_gram` and `slot_target` are the same for pair `near[w, s]` rotated at the frequency of
    pair w instead of its own: for q', k' that way, f is the real and the negated imaginary part of conj(q'_i) k'_j;
    zero where every pair is near itself only, which needs no gain. `value_moment` is E[z z^T] of z = sum_j a_ij x_j,
    over heads too: what values are read from.
    """

    bare_gram: Float[Tensor, "N P 4 4"]
    bare_target: Float[Tensor, "N P 4"]
    rotated_energy: Float[Tensor, "N P"]
    slot_gram: Float[Tensor, "N P S 2 2"]
    slot_target: Float[Tensor, "N P S 2"]
    value_moment: Float[Tensor, "D D"]

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
        self._spec, self._near = spec, near(spec.num_key_value_heads, pairs)
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
            "slot_gram": (heads, *self._near.shape, 2, 2),
            "slot_target": (heads, *self._near.shape, 2),
            "value_moment": (spec.hidden_size, spec.hidden_size),
        }
        self._sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._windows = self._rows = 0

    def update(self, hidden_BTD: Float[Tensor, "B T D"]) -> None:
        """Add the attention inputs of some windows."""
        for hidden_TD in hidden_BTD.float():
            self._add_window(hidden_TD)

    def finish(self) -> AttentionMoments:
        """The means of everything added so far."""
        means = {name: total / self._rows for name, total in self._sums.items()}
        means["value_moment"] /= self._spec.num_attention_heads
        return AttentionMoments(**means)

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
        bare_query, bare_key, turned_query, turned_key = map(_pairs, (query_NTd, key_GTd, turned_query, turned_key))
        self._add_bare(bare_query, turned_query, bare_key, turned_key, weights_NIT)
        for place, pair in enumerate(self._near.T if self._near.shape[1] > 1 else ()):
            self._add_slot(place, bare_query, turned_query, bare_key, turned_key, weights_NIT, pair, rows)
        self._windows += 1
        self._rows += len(rows)

    def _add_bare(
        self, query: Tensor, turned_query: Tensor, key: Tensor, turned_key: Tensor, weights_NIT: Tensor
    ) -> None:
        """The normal equations of `q^ . k^ ~ q^T M k`: per row, covariances over j, then moments over rows."""
        covariance = _covariance(weights_NIT, key, torch.cat((key, turned_key), dim=2))
        outer = query[:, :, :, None] * query[:, :, None]
        gram = torch.einsum("niabp,nicdp->npacbd", outer, covariance[:, :, :, :2])
        along = torch.einsum("nicdp,nidp->nicp", covariance[:, :, :, 2:], turned_query)
        target = torch.einsum("niap,nicp->npac", query, along)
        self._sums["bare_gram"] += gram.flatten(4).flatten(2, 3).double()
        self._sums["bare_target"] += target.flatten(2).double()
        spread = _covariance(weights_NIT, turned_key, turned_key)
        energy = torch.einsum("nicp,nicdp,nidp->np", turned_query, spread, turned_query)
        self._sums["rotated_energy"] += energy.double()

    def _add_slot(
        self,
        place: int,
        query: Tensor,
        turned_query: Tensor,
        key: Tensor,
        turned_key: Tensor,
        weights_NIT: Tensor,
        pair: Int[Tensor, " P"],
        rows: Tensor,
    ) -> None:
        """The same for `q^ . k^ ~ Re(gain conj(q') k')`, pair `pair[w]` rotated at the frequency of pair w."""
        moved_query = _pairs(self._rotate(query[..., pair].flatten(2), rows))
        moved_key = _pairs(self._rotate(key[..., pair].flatten(2), torch.arange(key.shape[1])))
        real, imaginary = moved_query.unbind(2)
        both = torch.stack((moved_query, torch.stack((imaginary, -real), dim=2)), dim=2)  # (N, I, feature, part, P)
        covariance = _covariance(weights_NIT, moved_key, torch.cat((moved_key, turned_key[..., pair]), dim=2))
        along = (both[..., None, :] * covariance[:, :, None]).sum(3)  # (N, I, feature, part of either key, P)
        gram = torch.einsum("niadp,nibdp->npab", along[:, :, :, :2], both)
        target = torch.einsum("niadp,nidp->npa", along[:, :, :, 2:], turned_query[..., pair])
        self._sums["slot_gram"][:, :, place] += gram.double()
        self._sums["slot_target"][:, :, place] += target.double()

    def _heads(self, hidden_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Float[Tensor, "h T d"]:
        flat = torch.nn.functional.linear(hidden_TD, weight, bias)
        return flat.unflatten(-1, (-1, self._spec.head_dim)).transpose(0, 1)

    def _rotate(self, x_hTd: Tensor, positions: Tensor) -> Float[Tensor, "h T d"]:
        cos, sin = self._cos[positions], self._sin[positions]
        real, imaginary = x_hTd.chunk(2, dim=-1)
        return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)


def _pairs(x_hTd: Float[Tensor, "h T d"]) -> Float[Tensor, "h T 2 P"]:
    return x_hTd.unflatten(-1, (2, -1))


def _covariance(
    weights_NIT: Float[Tensor, "N I T"], left: Float[Tensor, "G T a P"], right: Float[Tensor, "G T b P"]
) -> Float[Tensor, "N I a b P"]:
    """Covariances over j, pair by pair, under the attention weights of every row."""
    products = left[:, :, :, None] * right[:, :, None]
    sides = (left, right, products.flatten(2, 3))
    means = _per_group(weights_NIT, torch.cat(sides, dim=2).flatten(2)).unflatten(-1, (-1, left.shape[-1]))
    left_mean, right_mean, mean = means.split([side.shape[2] for side in sides], dim=2)
    return mean.unflatten(2, products.shape[2:4]) - left_mean[:, :, :, None] * right_mean[:, :, None]


def _per_group(left_NIx: Tensor, right_Gxy: Tensor) -> Float[Tensor, "N I y"]:
    """Multiply every query head by the matrix of its KV head."""
    heads, rows, width = left_NIx.shape
    grouped = left_NIx.reshape(len(right_Gxy), -1, width) @ right_Gxy
    return grouped.reshape(heads, rows, -1)
