"""Low rank: one solver, different metrics. Keys without rotation and values share the latent.

A method finds `down` (R, D), `up_key` (K, R) and `up_value` (V, R) such that `up_key down ~ W_k` and
`up_value down ~ W_v` for the stacked NoPE keys W_k (K, D) and values W_v (V, D) of all KV heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvfold.convert.statistics import LayerStatistics

DAMPING = 1e-3  # of the mean eigenvalue, on every root of a moment that must be inverted


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
    if rows <= width:
        gram = weight @ weight.T if moment is None else weight @ moment @ weight.T
        directions, singular = _top(gram, rank)
        down, up = directions.T @ weight, directions
        return down / singular.sqrt()[:, None], up * singular.sqrt()
    if moment is None:
        directions, singular = _top(weight.T @ weight, rank)
        return directions.T * singular.sqrt()[:, None], (weight @ directions) / singular.sqrt()
    damped = moment + DAMPING * moment.diagonal().mean() * torch.eye(width, dtype=moment.dtype)
    root = torch.linalg.cholesky(damped)
    whitened = weight @ root
    directions, singular = _top(whitened.T @ whitened, rank)
    down = torch.linalg.solve_triangular(root, directions.T, upper=False, left=False)
    return down * singular.sqrt()[:, None], (whitened @ directions) / singular.sqrt()


def _top(gram: Float[Tensor, "n n"], rank: int) -> tuple[Float[Tensor, "n R"], Float[Tensor, " R"]]:
    """Eigenvectors of the `rank` largest eigenvalues, and the roots of those, kept away from zero."""
    values, vectors = torch.linalg.eigh(gram)
    roots = values[-rank:].clamp_min(0).sqrt()
    floor = 1e-8 * roots[-1] if roots[-1] > 0 else torch.ones((), dtype=roots.dtype)
    return vectors[:, -rank:], roots.clamp_min(floor)


def svd_joint(key: Tensor, value: Tensor, rank: int, statistics: LayerStatistics) -> Factors:
    """`[W_k ; W_v] = U S V^T`, rank R: the joint SVD of the weights of arXiv 2502.14837."""
    down, up = reduced_rank(torch.cat((key, value)), rank)
    return Factors(down=down, up_key=up[: len(key)], up_value=up[len(key) :])


def svd_split(key: Tensor, value: Tensor, rank: int, statistics: LayerStatistics) -> Factors:
    """Separate SVDs of keys and values at half the rank each, so that the total is R as in the paper.

    (The released code of arXiv 2502.14837 gives each the full R.) What one side cannot use goes to the other.
    """
    key_rank = min(max(rank // 2, rank - len(value)), len(key))
    key_down, key_up = reduced_rank(key, key_rank)
    value_down, value_up = reduced_rank(value, rank - key_rank)
    return Factors(
        down=torch.cat((key_down, value_down)),
        up_key=torch.cat((key_up, key_up.new_zeros(len(key), rank - key_rank)), dim=1),
        up_value=torch.cat((value_up.new_zeros(len(value), key_rank), value_up), dim=1),
    )


def svd_whitened(key: Tensor, value: Tensor, rank: int, statistics: LayerStatistics) -> Factors:
    """The joint SVD under the covariance of the activations: least squared error of keys and values on the
    calibration text (the whitening of SVD-LLM, arXiv 2403.07378)."""
    assert statistics.tokens
    down, up = reduced_rank(torch.cat((key, value)), rank, statistics.second_moment)
    return Factors(down=down, up_key=up[: len(key)], up_value=up[len(key) :])


Factorization = Callable[[Tensor, Tensor, int, LayerStatistics], Factors]

FACTORIZATIONS: dict[str, Factorization] = {
    "svd_joint": svd_joint,
    "svd_split": svd_split,
    "svd_whitened": svd_whitened,
}

# What each method reads of the calibration: the plan runs none where nothing is needed.
NEEDS_CALIBRATION = frozenset({"svd_whitened"})
