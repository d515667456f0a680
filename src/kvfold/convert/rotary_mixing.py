"""Layout `shared`: one rotary key head for all, made of components mixed across the KV heads.

A complex-linear map across the G heads at one frequency commutes with RoPE. So the keys of all heads at frequency l,
the complex vector k_l (G), may be written in any basis before rotation, and the components that matter most be kept
for every query head at once. Keeping all of them is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from kvfold.convert.rotary_constants import Constants, best_constants, fold_constants
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit


@dataclass(frozen=True, kw_only=True)
class Components:
    """p rotary slots. Slot s caches `sum_{g,f} analysis[s, g, f] k_g[frequency[s, f]]`, rotated at the base frequency
    `slot[s]`; a query head of group g meets it with `sum_f conj(synthesis[s, g, f]) q[frequency[s, f]]`."""

    frequency: Int[Tensor, "p f"]
    slot: Int[Tensor, " p"]
    analysis: Complex[Tensor, "p G f"]
    synthesis: Complex[Tensor, "p G f"]
    gain: Complex[Tensor, " p"] | None = None


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Components of every frequency, by how much attention would miss them.

    With `Sigma_l = E[k_l k_l^H]` and `W_l = diag_g(sum over the group's heads of E|q_n,l|^2 rho_n,l)`, where rho is the
    share that no constant explains, `energy` and `vectors` are the eigenvalues (ascending) and eigenvectors of
    `W^1/2 Sigma W^1/2`, `root` is `W^1/2`. `unexplained` is rho over all query heads.
    """

    unexplained: Float[Tensor, " P"]
    energy: Float[Tensor, "P G"]
    vectors: Complex[Tensor, "P G j"]
    root: Float[Tensor, "P G"]

    def components(
        self,
        frequency: Int[Tensor, " p"],
        component: Int[Tensor, " p"],
        slot: Int[Tensor, " p"] | None = None,
        gain: Complex[Tensor, " p"] | None = None,
    ) -> Components:
        """Component (l, j): key `V_j^H W^1/2 k_l`, met by the query `conj((W^-1/2 V_j)_g) q_l`."""
        basis_pG, root_pG = self.vectors.transpose(1, 2)[frequency, component], self.root[frequency]
        return Components(
            frequency=frequency[:, None],
            slot=frequency if slot is None else slot,
            analysis=(basis_pG.conj() * root_pG)[..., None],
            synthesis=(basis_pG / root_pG)[..., None],
            gain=gain,
        )


Split = Callable[[LayerWeights, LayerStatistics, int], RotarySplit]
Choice = Callable[[LayerWeights, LayerStatistics, Spectrum, int], Components]


def mixed(weights: LayerWeights, statistics: LayerStatistics, spectrum: Spectrum, pairs: int) -> Components:
    """The components with the most energy, whatever their frequencies."""
    kept = spectrum.energy.flatten().topk(pairs).indices.sort().values
    heads = weights.spec.num_key_value_heads
    return spectrum.components(kept // heads, kept % heads)


def split_by(choice: Choice) -> Split:
    """A strategy that keeps the components of `choice`; the rest of the keys gets the best constants."""

    def split(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> RotarySplit:
        constants = best_constants(weights, statistics)
        spectrum = spectrum_of(weights, statistics, constants)
        # All components leave nothing to choose, not even for a choice of one per frequency.
        chooser = mixed if pairs == spectrum.energy.numel() else choice
        return split_by_components(weights, chooser(weights, statistics, spectrum, pairs), constants)

    return split


def split_by_components(weights: LayerWeights, chosen: Components, constants: Constants) -> RotarySplit:
    """Cache the chosen components with rotation; what they leave of the keys goes on without."""
    spec, pairs = weights.spec, len(chosen.slot)
    query, key = _complex(weights.query), _complex(weights.key)
    nope_width = 0 if pairs == spec.num_key_value_heads * spec.head_dim // 2 else spec.head_dim
    # A head is now as wide as both its parts; its softmax scale must stay that of the original width.
    scale = ((nope_width + 2 * pairs) / spec.head_dim) ** 0.5
    mix = chosen.synthesis.conj() if chosen.gain is None else chosen.synthesis.conj() * chosen.gain[:, None, None]
    mix_Npf = mix.transpose(0, 1).repeat_interleave(spec.query_groups, dim=0) * scale
    component_keys = torch.einsum("pgf,gpfD->pD", chosen.analysis, key[:, chosen.frequency])
    taken = torch.einsum("pgf,pD->gpfD", chosen.synthesis, component_keys).flatten(1, 2)
    rest = key.index_add(1, chosen.frequency.flatten(), -taken)
    bare_query, bare_bias = fold_constants(weights, constants)
    key_bias, query_bias = weights.key_bias, weights.query_bias
    return RotarySplit(
        index=chosen.slot[None],
        query_rope=_real(torch.einsum("npf,npfD->npD", mix_Npf, query[:, chosen.frequency])),
        query_nope=bare_query[:, :nope_width] * scale,
        key_rope=_real(component_keys)[None],
        key_nope=_real(rest)[:, :nope_width],
        query_rope_bias=None
        if query_bias is None
        else _real_row((mix_Npf * _complex_row(query_bias)[:, chosen.frequency]).sum(-1)),
        query_nope_bias=None if bare_bias is None else bare_bias[:, :nope_width] * scale,
        key_rope_bias=None
        if key_bias is None
        else _real_row(torch.einsum("pgf,gpf->p", chosen.analysis, _complex_row(key_bias)[:, chosen.frequency]))[None],
    )


def spectrum_of(weights: LayerWeights, statistics: LayerStatistics, constants: Constants) -> Spectrum:
    """The components of a layer, see `Spectrum`."""
    spec = weights.spec
    energy_NP = _query_energy(weights, statistics)
    missed_NP = energy_NP * constants.residual
    weight_PG = missed_NP.unflatten(0, (spec.num_key_value_heads, spec.query_groups)).sum(1).T
    floor = 1e-12 * weight_PG.mean()
    root_PG = weight_PG.clamp_min(floor if floor > 0 else 1.0).sqrt()  # it will be divided by
    gram = root_PG[:, :, None] * _key_moment(weights, statistics) * root_PG[:, None, :]
    energy_PG, vectors_PGj = torch.linalg.eigh(gram)
    unexplained = missed_NP.sum(0) / energy_NP.sum(0).clamp_min(1e-30)
    return Spectrum(unexplained=unexplained, energy=energy_PG, vectors=vectors_PGj, root=root_PG)


def _query_energy(weights: LayerWeights, statistics: LayerStatistics) -> Float[Tensor, "N P"]:
    """E|q_n,l|^2."""
    flat = weights.query.flatten(0, 1)
    energy = ((flat @ statistics.second_moment) * flat).sum(1)
    if weights.query_bias is not None:
        bias = weights.query_bias.flatten()
        energy = energy + 2 * bias * (flat @ statistics.mean) + bias.square()
    return energy.unflatten(0, (weights.spec.num_attention_heads, 2, -1)).sum(1)


def _key_moment(weights: LayerWeights, statistics: LayerStatistics) -> Complex[Tensor, "P G G"]:
    """`E[k_l k_l^H]` of every frequency over the KV heads."""
    spec = weights.spec
    heads, pairs = spec.num_key_value_heads, spec.head_dim // 2
    bias = None if weights.key_bias is None else weights.key_bias.flatten()
    moment = statistics.output_moment(weights.key.flatten(0, 1), bias)
    blocks = moment.view(heads, 2, pairs, heads, 2, pairs).diagonal(dim1=2, dim2=5)  # (g, part, h, part, l)
    real = blocks[:, 0, :, 0] + blocks[:, 1, :, 1]
    imaginary = blocks[:, 1, :, 0] - blocks[:, 0, :, 1]
    return torch.complex(real, imaginary).permute(2, 0, 1)


def _complex(weight_hdD: Float[Tensor, "h d D"]) -> Complex[Tensor, "h P D"]:
    """Rotary pairs as complex numbers: row l + i row (l + P)."""
    return torch.complex(*weight_hdD.chunk(2, dim=1))


def _complex_row(bias_hd: Float[Tensor, "h d"]) -> Complex[Tensor, "h P"]:
    return torch.complex(*bias_hd.chunk(2, dim=1))


def _real(z: Complex[Tensor, "*h p D"]) -> Float[Tensor, "*h 2*p D"]:
    return torch.cat((z.real, z.imag), dim=-2)


def _real_row(z: Complex[Tensor, "*h p"]) -> Float[Tensor, "*h 2*p"]:
    return torch.cat((z.real, z.imag), dim=-1)
