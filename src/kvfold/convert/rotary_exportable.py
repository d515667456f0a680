"""Layout `shared` within what stock DeepSeek code can express: one component per slot, the slots being the frequencies
of a uniform stride, or the fastest ones. And the strongest published method for it, TransMLA's RoRoPE."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvfold.convert.rotary_constants import identity
from kvfold.convert.rotary_mixing import (
    Components,
    Spectrum,
    Split,
    greedy,
    mixed,
    split_by,
    split_by_components,
)
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit


def stride_index(total: int, pairs: int) -> Int[Tensor, " p"]:
    """Frequencies l = 0, c, 2c, ... of `total`: those of a rotary head of 2p dims with the base model's theta."""
    assert total % pairs == 0
    return torch.arange(0, total, total // pairs)


def stride(spectrum: Spectrum, pairs: int) -> Components:
    """The strongest component of every c-th frequency."""
    return greedy(spectrum, pairs, _stride(spectrum, pairs), True, reach=0)[0]


def fastest(spectrum: Spectrum, pairs: int) -> Components:
    """The strongest component of each of the p fastest frequencies (theta' = theta^(d_r/d) in stock code)."""
    return greedy(spectrum, pairs, range(pairs), True, reach=0)[0]


def assigned(spectrum: Spectrum, pairs: int, **choices: int | float) -> Components:
    """One component of the keys around every c-th frequency, each pair with the gain that suits it best there."""
    return greedy(spectrum, pairs, _stride(spectrum, pairs), True, **choices)[0]


def _stride(spectrum: Spectrum, pairs: int) -> list[int]:
    return stride_index(len(spectrum.frequency), pairs).tolist()


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
        slots = stride_index(total, pairs)
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
