"""What replaces a rotation that is dropped: per query head and pair the best constant 2x2 matrix, or the rotation at
another frequency with the best gain."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights

DAMPING = 1e-3  # of the mean of a gram's diagonal
LEAST_VARIANCE = 1e-6  # of bare scores against rotated ones; below it are rounding errors


@dataclass(frozen=True, kw_only=True)
class Constants:
    """`matrix[n, l]` is M in the score q^T M k of an unrotated pair; `residual` the share of the rotated score's energy
    that it misses, and `residual_energy` that in absolute terms, for the softmax of each query head."""

    matrix: Float[Tensor, "N P 2 2"]
    residual: Float[Tensor, "N P"]
    residual_energy: Float[Tensor, "N P"]


def identity(weights: LayerWeights) -> Constants:
    """Rotation dropped and nothing put in its place but the gain of the rope scaling: the papers' choice."""
    spec = weights.spec
    shape = (spec.num_attention_heads, spec.head_dim // 2)
    matrix = weights.rope_gain * torch.eye(2, dtype=weights.query.dtype).repeat(*shape, 1, 1)
    ones = torch.ones(shape, dtype=weights.query.dtype)
    return Constants(matrix=matrix, residual=ones, residual_energy=ones)


def best_constants(weights: LayerWeights, statistics: LayerStatistics) -> Constants:
    """The M that minimise `sum_i Var_{j ~ a_i}(q^_i . k^_j - q_i^T M k_j)`, pair by pair.

    A softmax ignores a constant per row, and to second order the KL divergence between two attentions is half the
    variance of the score error under the attention weights; hence this objective. Without calibration, and for a pair
    whose bare scores hardly vary in the text (the same word again and again): the identity.
    """
    moments = statistics.attention
    if moments is None:
        return identity(weights)
    gram, target, energy = moments.bare_gram, moments.bare_target, moments.rotated_energy
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    known = scale > LEAST_VARIANCE * energy
    eye = torch.eye(4, dtype=gram.dtype)
    damped = torch.where(known[..., None, None], gram + DAMPING * scale[..., None, None] * eye, eye)
    kept = identity(weights).matrix.flatten(2)
    solution = torch.where(known[..., None], torch.linalg.solve(damped, target), kept)
    missed = energy - 2 * (solution * target).sum(-1) + torch.einsum("npa,npab,npb->np", solution, gram, solution)
    missed = missed.clamp_min(0)
    share = (missed / energy.clamp_min(torch.finfo(gram.dtype).tiny)).clamp(0, 1)
    share = torch.where(known, share, torch.ones_like(share))
    return Constants(matrix=solution.unflatten(-1, (2, 2)), residual=share, residual_energy=missed)


def slot_gains(
    weights: LayerWeights, statistics: LayerStatistics, frequency: Int[Tensor, "P S"]
) -> tuple[Complex[Tensor, "N P S"], Float[Tensor, "N P S"]]:
    """Rotate pair `frequency[w, s]` at the frequency of pair w: the gain on the query that is best in the same sense,
    and the share of the rotated score's energy that is missed then. Without calibration, all of it."""
    own = frequency == torch.arange(len(frequency))[:, None]
    moments = statistics.attention
    shape = (weights.spec.num_attention_heads, *frequency.shape)
    if moments is None:
        gain = own.expand(shape).to(weights.query.dtype)
        return torch.complex(gain, torch.zeros_like(gain)), 1 - gain
    gram, target, energy = moments.slot_gram, moments.slot_target, moments.rotated_energy[:, frequency]
    tiny = torch.finfo(gram.dtype).tiny
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    damped = gram + torch.where(scale > 0, DAMPING * scale, 1)[..., None, None] * torch.eye(2, dtype=gram.dtype)
    solution = torch.linalg.solve(damped, target)
    explained = 2 * (solution * target).sum(-1) - torch.einsum("npsa,npsab,npsb->nps", solution, gram, solution)
    missed = (1 - explained / energy.clamp_min(tiny)).clamp(0, 1).masked_fill(own, 0)
    gain = torch.complex(solution[..., 0], -solution[..., 1])  # on the query, which is conjugated in a score
    return gain.masked_fill(own, 1), missed


def fold_constants(
    weights: LayerWeights, constants: Constants
) -> tuple[Float[Tensor, "N d D"], Float[Tensor, "N d"] | None]:
    """Query rows and bias with the constants in them: the score q^T M k is (M^T q) . k."""
    parts = weights.query.unflatten(1, (2, -1))  # (N, part, P, D)
    query = torch.einsum("npab,napD->nbpD", constants.matrix, parts).flatten(1, 2)
    if weights.query_bias is None:
        return query, None
    bias = torch.einsum("npab,nap->nbp", constants.matrix, weights.query_bias.unflatten(1, (2, -1))).flatten(1)
    return query, bias
