"""Low rank: one solver, different metrics. Keys without rotation and values share the latent.

A method finds `down` (R, D), `up_key` (K, R) and `up_value` (V, R) such that `up_key down ~ W_k` and
`up_value down ~ W_v` for the stacked NoPE keys W_k (K, D) and values W_v (V, D) of all KV heads. What "close" means is
its `Metric`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit

DAMPING = 1e-3  # of the mean eigenvalue, on the moment of the inputs
ROOT_DAMPING = 1e-2  # of the mean eigenvalue, on the metric of one head
VALUE_BALANCE = 0.3  # values against keys, in units of the balance that makes both as large; measured
BALANCES = (0.15, 0.25, 0.35, 0.5, 0.8)  # what is tried for every layer where that is quick
READ_SHARE = 0.5  # of the moment that comes from what attention reads; measured


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The latent projection and the two expansions out of it."""

    down: Float[Tensor, "R D"]
    up_key: Float[Tensor, "K R"]
    up_value: Float[Tensor, "V R"]


def reduced_rank(
    weight: Float[Tensor, "o D"], rank: int, moment: Float[Tensor, "D D"] | None = None
) -> tuple[Float[Tensor, "R D"], Float[Tensor, "o R"]]:
    """The pair (down, up) of the given rank that minimises `E|W x - up down x|^2` for E[x x^T] = `moment`.

    Reduced-rank regression (`moment` None: identity), solved by the eigenvectors of the smaller Gram matrix of
    `Y = W moment^1/2 = U S V^T`: an SVD of the weight would cost many times more. The singular values are shared,
    S^1/2 to each factor, as in arXiv 2502.14837. A rank that covers all rows or the whole width is exact: down = W, or
    up = W. What is left of such a rank is zero.
    """
    rows, width = weight.shape
    if rank == 0:
        return weight.new_zeros(0, width), weight.new_zeros(rows, 0)
    if rank >= rows:
        return torch.cat((weight, weight.new_zeros(rank - rows, width))), torch.eye(rows, rank, dtype=weight.dtype)
    if rank >= width:
        return torch.eye(rank, width, dtype=weight.dtype), torch.cat((weight, weight.new_zeros(rows, rank - width)), 1)
    damped = None if moment is None else _damped(moment)
    if rows <= width:
        gram = weight @ weight.T if damped is None else weight @ damped @ weight.T
        directions, singular = _top(gram, rank)
        down, up = directions.T @ weight, directions
        return down / singular.sqrt()[:, None], up * singular.sqrt()
    if damped is None:
        directions, singular = _top(weight.T @ weight, rank)
        return directions.T * singular.sqrt()[:, None], (weight @ directions) / singular.sqrt()
    root = torch.linalg.cholesky(damped)
    whitened = weight @ root
    directions, singular = _top(whitened.T @ whitened, rank)
    down = torch.linalg.solve_triangular(root, directions.T, upper=False, left=False)
    return down * singular.sqrt()[:, None], (whitened @ directions) / singular.sqrt()


def _damped(moment: Float[Tensor, "D D"]) -> Float[Tensor, "D D"]:
    """Inputs that the text did not have count a little: it may have had few, and the inverse must exist."""
    size = moment.diagonal().mean()
    return moment + (DAMPING * size if size > 0 else 1.0) * torch.eye(len(moment), dtype=moment.dtype)


def _top(gram: Float[Tensor, "n n"], rank: int) -> tuple[Float[Tensor, "n R"], Float[Tensor, " R"]]:
    """Eigenvectors of the `rank` largest eigenvalues, and the roots of those, kept away from zero."""
    values, vectors = torch.linalg.eigh(gram)
    roots = values[-rank:].clamp_min(0).sqrt()
    floor = 1e-8 * roots[-1] if roots[-1] > 0 else torch.ones((), dtype=roots.dtype)
    return vectors[:, -rank:], roots.clamp_min(floor)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Errors are `E|key_root (W_k - up_key down) x|^2 + E|value_root (W_v - up_value down) x|^2` with
    E[x x^T] = `moment`, head by head. None: the identity."""

    moment: Float[Tensor, "D D"] | None = None
    key_root: Float[Tensor, "G n n"] | None = None
    value_root: Float[Tensor, "G v v"] | None = None


def factorize(split: RotarySplit, weights: LayerWeights, rank: int, metric: Metric) -> Factors:
    """The factors of the given rank with the least error under `metric`."""
    key = _apply(metric.key_root, split.key_nope)
    value = _apply(metric.value_root, weights.value)
    down, up = reduced_rank(torch.cat((key, value)), rank, metric.moment)
    up_key, up_value = up[: len(key)], up[len(key) :]
    return Factors(
        down=down,
        up_key=_undo(metric.key_root, up_key, split.key_nope.shape[1]),
        up_value=_undo(metric.value_root, up_value, weights.value.shape[1]),
    )


def _apply(root: Tensor | None, rows_GwD: Float[Tensor, "G w D"]) -> Float[Tensor, "Gw D"]:
    return (rows_GwD if root is None else root @ rows_GwD).flatten(0, 1)


def _undo(root: Tensor | None, rows: Float[Tensor, "Gw R"], width: int) -> Float[Tensor, "Gw R"]:
    if root is None or not width:
        return rows
    return torch.linalg.solve(root, rows.unflatten(0, (-1, width))).flatten(0, 1)


def svd_joint(split: RotarySplit, weights: LayerWeights, statistics: LayerStatistics, rank: int) -> Factors:
    """`[W_k ; W_v] = U S V^T`, rank R: the joint SVD of the weights of arXiv 2502.14837."""
    return factorize(split, weights, rank, Metric())


def svd_split(split: RotarySplit, weights: LayerWeights, statistics: LayerStatistics, rank: int) -> Factors:
    """Separate SVDs of keys and values at half the rank each, so that the total is R as in the paper.

    (The released code of arXiv 2502.14837 gives each the full R.) What one side cannot use goes to the other.
    """
    key, value = split.key_nope.flatten(0, 1), weights.value.flatten(0, 1)
    key_rank = min(max(rank // 2, rank - len(value)), len(key))
    key_down, key_up = reduced_rank(key, key_rank)
    value_down, value_up = reduced_rank(value, rank - key_rank)
    return Factors(
        down=torch.cat((key_down, value_down)),
        up_key=torch.cat((key_up, key_up.new_zeros(len(key), rank - key_rank)), dim=1),
        up_value=torch.cat((value_up.new_zeros(len(value), key_rank), value_up), dim=1),
    )


def svd_whitened(split: RotarySplit, weights: LayerWeights, statistics: LayerStatistics, rank: int) -> Factors:
    """The joint SVD under the covariance of the activations: least squared error of keys and values on the
    calibration text (the whitening of SVD-LLM, arXiv 2403.07378)."""
    assert statistics.tokens
    return factorize(split, weights, rank, Metric(moment=statistics.second_moment))


def pca_balanced(split: RotarySplit, weights: LayerWeights, statistics: LayerStatistics, rank: int) -> Factors:
    """Joint principal components of the activations of keys and values, the values first scaled to the size of the
    keys: TransMLA's (arXiv 2502.07864)."""
    assert statistics.tokens
    metric = Metric(moment=statistics.second_moment)
    return factorize(split, weights, rank, _balanced(split, weights, metric, 1.0))


def attention_aware(
    split: RotarySplit,
    weights: LayerWeights,
    statistics: LayerStatistics,
    rank: int,
    balance: float = VALUE_BALANCE,
) -> Factors:
    """The joint SVD in units of what attention does with keys and values.

    Keys count by the scores they make, with the root of `sum_n E[q_n q_n^T]` over the query heads of a group (the
    queries that meet the unrotated keys, constants included); values by the output they make, with the root of
    `sum_n W_o,n^T W_o,n`. Inputs are weighted half by how often they occur and half by how attention reads them (the
    moment of the attention-weighted means of x). `balance` scales the values, 1 making both as large.
    """
    return factorize(split, weights, rank, _attention_metric(split, weights, statistics, balance))


def metric_spectrum(split: RotarySplit, weights: LayerWeights, statistics: LayerStatistics) -> Float[Tensor, " ranks"]:
    """The error that each further rank of `attention_aware` removes, largest first."""
    metric = _attention_metric(split, weights, statistics, VALUE_BALANCE)
    assert metric.moment is not None
    rows = torch.cat((_apply(metric.key_root, split.key_nope), _apply(metric.value_root, weights.value)))
    return torch.linalg.eigvalsh(rows @ metric.moment @ rows.T).flip(0)[: weights.spec.hidden_size]


def _attention_metric(split: RotarySplit, weights: LayerWeights, statistics: LayerStatistics, balance: float) -> Metric:
    assert statistics.tokens
    spec = weights.spec
    query = statistics.head_moments(split.query_nope, split.query_nope_bias)
    key_metric = query.unflatten(0, (-1, spec.query_groups)).sum(1)
    output = weights.output.unflatten(1, (spec.num_key_value_heads, spec.query_groups, spec.head_dim))
    value_metric = torch.einsum("ogmv,ogmw->gvw", output, output)
    metric = Metric(moment=_read_moment(statistics), key_root=_root(key_metric), value_root=_root(value_metric))
    return _balanced(split, weights, metric, balance)


def _read_moment(statistics: LayerStatistics) -> Float[Tensor, "D D"]:
    occurring = _of_unit_trace(statistics.second_moment)
    if statistics.attention is None:
        return occurring
    return (1 - READ_SHARE) * occurring + READ_SHARE * _of_unit_trace(statistics.attention.value_moment)


def _of_unit_trace(moment: Float[Tensor, "D D"]) -> Float[Tensor, "D D"]:
    return moment / moment.trace().clamp_min(torch.finfo(moment.dtype).tiny)  # a pruned layer's is zero


def _balanced(split: RotarySplit, weights: LayerWeights, metric: Metric, balance: float) -> Metric:
    """The metric with the values scaled to `balance` times the size of the keys."""
    assert metric.moment is not None
    sizes = []
    for rows in (_apply(metric.key_root, split.key_nope), _apply(metric.value_root, weights.value)):
        sizes.append(float(((rows @ metric.moment) * rows).sum()))
    if min(sizes) <= 0:  # nothing to balance: no unrotated keys, or a pruned layer
        return metric
    scale = balance * (sizes[0] / sizes[1]) ** 0.5
    heads, width = weights.value.shape[:2]
    root = torch.eye(width, dtype=weights.value.dtype).repeat(heads, 1, 1)
    return replace(metric, value_root=scale * (root if metric.value_root is None else metric.value_root))


def _root(moment_Gww: Float[Tensor, "G w w"]) -> Float[Tensor, "G w w"]:
    """The symmetric root of each matrix, damped."""
    values, vectors = torch.linalg.eigh(moment_Gww)
    values = values.clamp_min(0)
    floor = ROOT_DAMPING * values.mean(-1, keepdim=True)
    values = values + torch.where(floor > 0, floor, torch.ones_like(floor))
    return (vectors * values.sqrt()[:, None]) @ vectors.mT


Factorization = Callable[..., Factors]  # of (split, weights, statistics, rank) and, for some, a balance

FACTORIZATIONS: dict[str, Factorization] = {
    "attention_aware": attention_aware,
    "svd_whitened": svd_whitened,
    "pca_balanced": pca_balanced,
    "svd_joint": svd_joint,
    "svd_split": svd_split,
}

# What each method reads of the calibration: the plan runs none where nothing is needed.
NEEDS_CALIBRATION = frozenset({"attention_aware", "svd_whitened", "pca_balanced"})
NEEDS_ATTENTION = frozenset({"attention_aware"})
# Those that take a `balance`.
BALANCED = frozenset({"attention_aware"})
