"""Layout `shared`: one rotary key head for all, made of components mixed across the KV heads.

A complex-linear map across the G heads at one frequency commutes with RoPE. So the keys of all heads at frequency l,
the complex vector k_l (G), may be written in any basis before rotation, and the components that matter most be kept
for every query head at once. Keeping all of them is exact.
"""

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit


def split_by_components(weights: LayerWeights, statistics: LayerStatistics, pairs: int) -> RotarySplit:
    """Keep the `pairs` cross-head components with the most energy.

    With `Sigma_l = E[k_l k_l^H]` and `W_l = diag_g(sum over the group's heads of E|q_n,l|^2)`, take the eigenvectors V
    of `W^1/2 Sigma W^1/2`. Component (l, j) caches `V_j^H W^1/2 k_l`; a query head of group g meets it with
    `conj((W^-1/2 V_j)_g) q_l`. What the kept components leave of the keys goes on without rotation.
    """
    spec, total = weights.spec, weights.spec.head_dim // 2
    query, key = _complex(weights.query), _complex(weights.key)
    root_PG = _query_energy(weights, statistics).sqrt()
    gram = root_PG[:, :, None] * _key_moment(weights, statistics) * root_PG[:, None, :]
    energy_PG, vectors_PGj = torch.linalg.eigh(gram)
    kept = energy_PG.flatten().topk(pairs).indices.sort().values
    frequency, component = kept // spec.num_key_value_heads, kept % spec.num_key_value_heads
    basis_pG = vectors_PGj.transpose(1, 2)[frequency, component]
    analysis_pG, synthesis_pG = basis_pG.conj() * root_PG[frequency], basis_pG / root_PG[frequency]
    nope_width = 0 if pairs == spec.num_key_value_heads * total else spec.head_dim
    # A head is now as wide as both its parts; its softmax scale must stay that of the original width.
    scale = ((nope_width + 2 * pairs) / spec.head_dim) ** 0.5
    query_mix_Np = synthesis_pG.conj().T.repeat_interleave(spec.query_groups, dim=0) * scale
    gain = scale * weights.rope_gain
    key_bias, query_bias = weights.key_bias, weights.query_bias
    component_keys = torch.einsum("pg,gpD->pD", analysis_pG, key[:, frequency])
    rest = key.index_add(1, frequency, -torch.einsum("pg,pD->gpD", synthesis_pG, component_keys))
    return RotarySplit(
        index=frequency[None],
        query_rope=_real(query_mix_Np[..., None] * query[:, frequency]),
        query_nope=weights.query[:, :nope_width] * gain,
        key_rope=_real(component_keys)[None],
        key_nope=_real(rest)[:, :nope_width],
        query_rope_bias=None
        if query_bias is None
        else _real_row(query_mix_Np * _complex_row(query_bias)[:, frequency]),
        query_nope_bias=None if query_bias is None else query_bias[:, :nope_width] * gain,
        key_rope_bias=None
        if key_bias is None
        else _real_row((analysis_pG * _complex_row(key_bias)[:, frequency].T).sum(1))[None],
    )


def _query_energy(weights: LayerWeights, statistics: LayerStatistics) -> Float[Tensor, "P G"]:
    """`sum_{n in g} E|q_n,l|^2`, kept away from zero so that it can be divided by."""
    spec = weights.spec
    flat = weights.query.flatten(0, 1)
    energy = ((flat @ statistics.second_moment) * flat).sum(1)
    if weights.query_bias is not None:
        bias = weights.query_bias.flatten()
        energy = energy + 2 * bias * (flat @ statistics.mean) + bias.square()
    per_pair = energy.unflatten(0, (spec.num_key_value_heads, spec.query_groups, 2, -1)).sum((1, 2)).T
    return per_pair.clamp_min(1e-12 * per_pair.mean().clamp_min(1e-30))


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
    return torch.complex(*weight_hdD.chunk(2, dim=1))


def _complex_row(bias_hd: Float[Tensor, "h d"]) -> Complex[Tensor, "h P"]:
    return torch.complex(*bias_hd.chunk(2, dim=1))


def _real(z: Complex[Tensor, "*h p D"]) -> Float[Tensor, "*h 2*p D"]:
    return torch.cat((z.real, z.imag), dim=-2)


def _real_row(z: Complex[Tensor, "*h p"]) -> Float[Tensor, "*h 2*p"]:
    return torch.cat((z.real, z.imag), dim=-1)
