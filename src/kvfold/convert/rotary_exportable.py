"""Layout `shared` within what stock DeepSeek code can express: one component per frequency of a uniform stride, or of
the fastest ones. And the strongest published method for it, TransMLA's RoRoPE."""

import torch
from jaxtyping import Complex, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from kvfold.convert.rotary_constants import identity
from kvfold.convert.rotary_mixing import Components, Spectrum, Split, mixed, split_by, split_by_components
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit


def stride_index(weights: LayerWeights, pairs: int) -> Int[Tensor, " p"]:
    """Frequencies l = 0, c, 2c, ... of a rotary head of 2p dims with the base model's theta."""
    total = weights.spec.head_dim // 2
    assert total % pairs == 0
    return torch.arange(0, total, total // pairs)


def stride(weights: LayerWeights, statistics: LayerStatistics, spectrum: Spectrum, pairs: int) -> Components:
    """The strongest component of every c-th frequency."""
    return _strongest(spectrum, stride_index(weights, pairs))


def fastest(weights: LayerWeights, statistics: LayerStatistics, spectrum: Spectrum, pairs: int) -> Components:
    """The strongest component of each of the p fastest frequencies (theta' = theta^(d_r/d) in stock code)."""
    return _strongest(spectrum, torch.arange(pairs))


def _strongest(spectrum: Spectrum, frequency: Int[Tensor, " p"]) -> Components:
    return spectrum.components(frequency, torch.full_like(frequency, spectrum.energy.shape[1] - 1))


def assigned(weights: LayerWeights, statistics: LayerStatistics, spectrum: Spectrum, pairs: int) -> Components:
    """Components of any frequency on the slots of a uniform stride, at the least total cost.

    A component of frequency theta that is rotated at w has the best gain g = E exp(i (theta - w) t), t the distance
    that attention reaches back, and misses 1 - |g|^2 of its energy; a constant misses rho of it. The assignment with
    the largest sum of `energy (1 - (1 - |g|^2) / rho)` (energy has the factor rho in it) is found exactly.
    """
    slots = stride_index(weights, pairs)
    gain_Ps = _gains(weights, statistics, slots)
    worth_Ps = 1 - (1 - gain_Ps.abs().square()) / spectrum.unexplained.clamp_min(1e-6)[:, None]
    benefit_PGs = spectrum.energy[..., None] * worth_Ps.clamp_min(0)[:, None]
    chosen, place = linear_sum_assignment(benefit_PGs.flatten(0, 1).numpy(), maximize=True)
    kept = torch.as_tensor(chosen)[torch.as_tensor(place).argsort()]
    heads = weights.spec.num_key_value_heads
    frequency, component = kept // heads, kept % heads
    return spectrum.components(frequency, component, slots, gain_Ps[frequency, torch.arange(pairs)])


def _gains(weights: LayerWeights, statistics: LayerStatistics, slots: Int[Tensor, " p"]) -> Complex[Tensor, "P p"]:
    """`E exp(i (theta_l - theta_s) t)` over the distances t that attention reaches back; without calibration over 0 to
    511 alike."""
    theta = weights.frequency
    apart = theta[:, None] - theta[slots]
    moments = statistics.attention
    share = torch.full((512,), 1 / 512, dtype=theta.dtype) if moments is None else moments.distance.to(theta.dtype)
    angle = apart[..., None] * torch.arange(len(share), dtype=theta.dtype)
    return torch.complex(angle.cos() @ share, angle.sin() @ share)


def rorope(fold: int) -> Split:
    """RoRoPE of TransMLA (arXiv 2502.07864) with a fold factor of `fold` strides, as published: gain 1, nothing in
    place of a dropped rotation.

    Within a group of f = fold * c adjacent frequencies, taken as one, the keys of all heads are turned by a real
    orthogonal matrix (their principal components, the same for real and imaginary parts). The f / c largest components
    keep RoPE, on the frequencies l, l + c, ... of their group.
    """

    def split(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> RotarySplit:
        heads, total = weights.spec.num_key_value_heads, weights.spec.head_dim // 2
        if pairs == heads * total:
            return split_by(mixed)(weights, statistics, pairs)
        slots = stride_index(weights, pairs)
        kept = min(fold, pairs)  # components of a group; a group has kept * c frequencies
        assert pairs % kept == 0
        groups = torch.arange(total).view(pairs // kept, -1)
        moment = _real_moment(weights, statistics)
        basis = []
        for group in groups:
            block = moment[:, group][:, :, :, group].flatten(2).flatten(0, 1)
            vectors = torch.linalg.eigh(block).eigenvectors[:, -kept:].flip(1)
            basis.append(vectors.T.unflatten(1, (heads, -1)))
        basis_pGf = torch.cat(basis)
        basis_pGf = torch.complex(basis_pGf, torch.zeros_like(basis_pGf))
        frequency = groups.repeat_interleave(kept, dim=0)
        chosen = Components(frequency=frequency, slot=slots, analysis=basis_pGf, synthesis=basis_pGf)
        return split_by_components(weights, chosen, identity(weights))

    return split


def _real_moment(weights: LayerWeights, statistics: LayerStatistics) -> Float[Tensor, "G P G P"]:
    """`E[Re k Re k^T + Im k Im k^T]` over all heads and frequencies."""
    bias = None if weights.key_bias is None else weights.key_bias.flatten()
    moment = statistics.output_moment(weights.key.flatten(0, 1), bias)
    heads = weights.spec.num_key_value_heads
    parts = moment.view(heads, 2, -1, heads, 2, moment.shape[0] // heads // 2)
    return parts[:, 0, :, :, 0] + parts[:, 1, :, :, 1]
