"""Layout `per_head`: each KV head keeps RoPE on some of its own pairs (MHA2MLA, arXiv 2502.14837)."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvfold.convert.rotary_constants import Constants, best_constants, fold_constants, identity
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit

Selection = Callable[[LayerWeights, LayerStatistics, int], Int[Tensor, "G p"]]


def _same_for_all(weights: LayerWeights, chosen: Int[Tensor, " p"]) -> Int[Tensor, "G p"]:
    return chosen.repeat(weights.spec.num_key_value_heads, 1)


def high(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> Int[Tensor, "G p"]:
    """The fastest pairs: l < r."""
    return _same_for_all(weights, torch.arange(pairs))


def low(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> Int[Tensor, "G p"]:
    """The slowest pairs: l >= P - r."""
    total = weights.spec.head_dim // 2
    return _same_for_all(weights, torch.arange(total - pairs, total))


def uniform(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> Int[Tensor, "G p"]:
    """Evenly spaced pairs: l = floor(j P / r) for j < r."""
    return _same_for_all(weights, torch.arange(pairs) * (weights.spec.head_dim // 2) // pairs)


def two_norm(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> Int[Tensor, "G p"]:
    """Per KV head the pairs with the largest `E|q_l| E|k_l|`, pre-RoPE, summed over the query heads of the group."""
    assert statistics.query_norm is not None and statistics.key_norm is not None
    query_gP = statistics.query_norm.unflatten(0, (weights.spec.num_key_value_heads, -1)).sum(1)
    return _largest(query_gP * statistics.key_norm, pairs)


SELECTIONS: dict[str, Selection] = {"2-norm": two_norm, "high": high, "low": low, "uniform": uniform, "full": high}


def select_pairs(name: str) -> Callable[[LayerWeights, LayerStatistics, int], RotarySplit]:
    """The published strategy of that name: unrotated pairs keep their weights."""

    def split(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> RotarySplit:
        return split_by_pairs(weights, SELECTIONS[name](weights, statistics, pairs), identity(weights))

    return split


def rotation_error(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> RotarySplit:
    """Per KV head the pairs whose rotation a constant replaces worst; the others get that constant."""
    constants = best_constants(weights, statistics)
    missed_gP = constants.residual_energy.unflatten(0, (weights.spec.num_key_value_heads, -1)).sum(1)
    return split_by_pairs(weights, _largest(missed_gP, pairs), constants)


def _largest(score_GP: Float[Tensor, "G P"], pairs: int) -> Int[Tensor, "G p"]:
    return score_GP.topk(pairs, dim=1).indices.sort(dim=1).values


def split_by_pairs(weights: LayerWeights, index_Gp: Int[Tensor, "G p"], constants: Constants) -> RotarySplit:
    """Keep RoPE on the given pairs of each KV head; the others lose their rotation to the constants."""
    spec, pairs = weights.spec, weights.spec.head_dim // 2
    kept = torch.zeros(spec.num_key_value_heads, pairs, dtype=torch.bool)
    kept[torch.arange(spec.num_key_value_heads)[:, None], index_Gp] = True
    rest_Gp = torch.stack([torch.nonzero(~row).flatten() for row in kept])
    rope, nope = (torch.cat((index, index + pairs), dim=1) for index in (index_Gp, rest_Gp))
    query_rope, query_nope = (dims.repeat_interleave(spec.query_groups, dim=0) for dims in (rope, nope))
    bare_query, bare_bias = fold_constants(weights, constants)
    bias = weights.query_bias
    return RotarySplit(
        index=index_Gp,
        query_rope=_rows(weights.query, query_rope),
        query_nope=_rows(bare_query, query_nope),
        key_rope=_rows(weights.key, rope),
        key_nope=_rows(weights.key, nope),
        query_rope_bias=None if bias is None else bias.gather(1, query_rope),
        query_nope_bias=None if bare_bias is None else bare_bias.gather(1, query_nope),
        key_rope_bias=None if weights.key_bias is None else weights.key_bias.gather(1, rope),
    )


def _rows(weight_hdD: Float[Tensor, "h d D"], rows_hr: Int[Tensor, "h r"]) -> Float[Tensor, "h r D"]:
    return weight_hdD.gather(1, rows_hr[..., None].expand(-1, -1, weight_hdD.shape[-1]))
