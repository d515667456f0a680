"""Layout `shared`: one rotary key head for all, made of components mixed across KV heads and nearby frequencies.

A complex-linear map across the G heads at one frequency commutes with RoPE. So the keys of all heads at frequency l,
the complex vector k_l (G), may be written in any basis before rotation, and the components that matter most be kept
for every query head at once. Keeping all of them is exact. Across frequencies it is an approximation: a pair that is
rotated at the frequency of a neighbour, with the gain that suits it best, is often much better off than without.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from kvfold.convert.attention_moments import near
from kvfold.convert.rotary_constants import Constants, best_constants, fold_constants, slot_gains
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit

REACH, PRICE = 1, 2.0
TRIALS: tuple[dict[str, int | float], ...] = (
    {"reach": 0},
    {"reach": 1, "price": 1.0},
    {"reach": 1, "price": 2.0},
    {"reach": 2, "price": 1.0},
    {"reach": 2, "price": 2.0},
    {"reach": 2, "price": 4.0},
)
"""How far from its own frequency a pair may be rotated, and what is missed there counts (see `Spectrum.worth`): far and
cheap is best where few components are kept. Found by trial, layer by layer, where that is quick."""


@dataclass(frozen=True, kw_only=True)
class Components:
    """p rotary slots, taken one after another. With r what those before have left of the keys, slot s caches
    `sum_{g,f} analysis[s, g, f] r_g[frequency[s, f]]`, rotated at the base frequency `slot[s]`; query head n of group g
    meets it with `sum_f gain[n, s, f] conj(synthesis[s, g, f]) q_n[frequency[s, f]]`."""

    frequency: Int[Tensor, "p f"]
    slot: Int[Tensor, " p"]
    analysis: Complex[Tensor, "p G f"]
    synthesis: Complex[Tensor, "p G f"]
    gain: Complex[Tensor, "N p f"] | None = None


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """What each rotary slot is worth to the keys of each frequency near it.

    `moment` is E[k k^H] over frequencies and KV heads. For the keys of head g at frequency `frequency[w, s]`, attention
    misses `bare[w, s, g]` of every |k|^2 if they have the best constant, and `moved[w, s, g]` if they are rotated at w:
    `sum_n E|q_n|^2 rho_n` over the query heads of the group, with the shares rho that each misses. `gain[n, w, s]` is
    the best one for that. At the own frequency, nothing is missed and the gain is 1.
    """

    moment: Complex[Tensor, "P G P G"]
    frequency: Int[Tensor, "P S"]
    bare: Float[Tensor, "P S G"]
    moved: Float[Tensor, "P S G"]
    gain: Complex[Tensor, "N P S"]

    def worth(self, reach: int | float = REACH, price: float = PRICE) -> Float[Tensor, "P S G"]:
        """What a slot saves per |k|^2, where what is missed there counts `price` times; nothing beyond `reach`
        frequencies. At the own frequency it is a little in any case, because it will be divided by."""
        apart = (self.frequency - torch.arange(len(self.frequency))[:, None]).abs()[..., None]
        saved = torch.where(apart <= reach, (self.bare - price * self.moved).clamp_min(0), 0)
        floor = 1e-12 * float(saved.max())
        return torch.where(apart == 0, saved.clamp_min(floor or 1.0), saved)

    def energy(self) -> float:
        """All that attention would miss if nothing were rotated."""
        slots = torch.arange(len(self.frequency))
        own = self.worth(reach=0).sum(1)
        return float((own * self.moment[slots, :, slots].diagonal(dim1=1, dim2=2).real).sum())


Split = Callable[..., RotarySplit]  # of (weights, statistics, pairs) and, for some, a reach and a price
Choice = Callable[..., Components]  # of (spectrum, pairs), a reach and a price


def mixed(spectrum: Spectrum, pairs: int, **choices: int | float) -> Components:
    """The components with the most energy, at any frequency, as many at one as there are."""
    return greedy(spectrum, pairs, range(len(spectrum.frequency)), **choices)[0]


def greedy(
    spectrum: Spectrum, pairs: int, slots: Sequence[int], once: bool = False, /, **choices: int | float
) -> tuple[Components, Float[Tensor, " p"]]:
    """Components, and the energy that each takes: again and again the strongest of any slot, removed from the keys.

    With v the first eigenvector of `D E[r r^H] D`, r being what is left of the keys and D^2 the slot's worth, the
    component is `v^H D r`, and what it explains of r is `D^-1 v` times it.

    Args:
        slots: those to choose from.
        once: no slot takes more than one component.
        choices: `reach` and `price`, see `Spectrum.worth`.
    """
    heads = spectrum.bare.shape[2]
    places = (spectrum.frequency[:, :, None] * heads + torch.arange(heads)).flatten(1)
    roots, real_worth = spectrum.worth(**choices).sqrt().flatten(1), (spectrum.bare - spectrum.moved).flatten(1)
    moment = spectrum.moment.flatten(2).flatten(0, 1).clone()
    vectors: dict[int, Tensor] = {}

    def bid(slot: int) -> tuple[float, int, int]:
        place, root = places[slot], roots[slot]
        values, basis = torch.linalg.eigh(root[:, None] * moment[place[:, None], place] * root)
        vectors[slot] = basis[:, -1]
        return -float(values[-1]), slot, len(chosen)

    # What a slot bid before is nearly always more than it bids now, because keys only lose: few have to bid anew.
    chosen: list[tuple[int, float]] = []
    analyses, syntheses = [], []
    bids = [bid(slot) for slot in slots]
    heapq.heapify(bids)
    while len(chosen) < pairs:
        energy, slot, time = heapq.heappop(bids)
        if time < len(chosen):
            heapq.heappush(bids, bid(slot))
            continue
        place, root, vector = places[slot], roots[slot], vectors[slot]
        known = root > 1e-6 * root.max()
        analysis = vector.conj() * root
        synthesis = torch.where(known, vector, 0) / torch.where(known, root, 1)
        moment[place] -= torch.outer(synthesis, analysis @ moment[place])
        moment[:, place] -= torch.outer(moment[:, place] @ analysis.conj(), synthesis.conj())
        saved = float((real_worth[slot] * synthesis.abs().square()).sum())
        chosen.append((slot, max(-energy, 0.0) * saved))
        analyses.append(analysis)
        syntheses.append(synthesis)
        if not once:
            heapq.heappush(bids, (energy, slot, -1))
    slot = torch.tensor([slot for slot, _ in chosen])
    analysis, synthesis = (torch.stack(rows).unflatten(1, (-1, heads)).mT for rows in (analyses, syntheses))
    found = Components(
        frequency=spectrum.frequency[slot],
        slot=slot,
        analysis=analysis,
        synthesis=synthesis,
        gain=spectrum.gain[:, slot],
    )
    return found, torch.tensor([energy for _, energy in chosen])


def everything(weights: LayerWeights) -> Components:
    """All components, at their own frequencies."""
    heads, total = weights.spec.num_key_value_heads, weights.spec.head_dim // 2
    frequency = torch.arange(total).repeat_interleave(heads)
    unit = torch.eye(heads).repeat(total, 1)[..., None].to(_complex(weights.key).dtype)
    return Components(frequency=frequency[:, None], slot=frequency, analysis=unit, synthesis=unit)


def split_by(choice: Choice) -> Split:
    """A strategy that keeps the components of `choice`; the rest of the keys gets the best constants."""

    def split(weights: LayerWeights, statistics: LayerStatistics, pairs: int, **choices: int | float) -> RotarySplit:
        constants = best_constants(weights, statistics)
        if pairs == weights.spec.num_key_value_heads * weights.spec.head_dim // 2:
            return split_by_components(weights, everything(weights), constants)
        spectrum = spectrum_of(weights, statistics, constants)
        return split_by_components(weights, choice(spectrum, pairs, **choices), constants)

    return split


def split_by_components(weights: LayerWeights, chosen: Components, constants: Constants) -> RotarySplit:
    """Cache the chosen components with rotation; what they leave of the keys goes on without."""
    spec, pairs = weights.spec, len(chosen.slot)
    query = _complex(weights.query, weights.query_bias)
    nope_width = 0 if pairs == spec.num_key_value_heads * spec.head_dim // 2 else spec.head_dim
    # A head is now as wide as both its parts; its softmax scale must stay that of the original width.
    scale = ((nope_width + 2 * pairs) / spec.head_dim) ** 0.5
    mix_Npf = chosen.synthesis.conj().transpose(0, 1).repeat_interleave(spec.query_groups, dim=0) * scale
    if chosen.gain is not None:
        mix_Npf = mix_Npf * chosen.gain
    rest, cached = _complex(weights.key, weights.key_bias), []
    for frequency, analysis, synthesis in zip(chosen.frequency, chosen.analysis, chosen.synthesis, strict=True):
        cached.append(torch.einsum("gf,gfD->D", analysis, rest[:, frequency]))
        rest[:, frequency] -= synthesis[..., None] * cached[-1]
    order = chosen.slot.argsort(stable=True)
    query_rope, query_rope_bias = _real(
        torch.einsum("npf,npfD->npD", mix_Npf, query[:, chosen.frequency])[:, order], weights.query_bias
    )
    key_rope, key_rope_bias = _real(torch.stack(cached)[None, order], weights.key_bias)
    key_nope, _ = _real(rest, weights.key_bias)
    bare_query, bare_bias = fold_constants(weights, constants)
    return RotarySplit(
        index=chosen.slot[order][None],
        query_rope=query_rope,
        query_nope=bare_query[:, :nope_width] * scale,
        key_rope=key_rope,
        key_nope=key_nope[:, :nope_width],
        query_rope_bias=query_rope_bias,
        query_nope_bias=None if bare_bias is None else bare_bias[:, :nope_width] * scale,
        key_rope_bias=key_rope_bias,
    )


def spectrum_of(weights: LayerWeights, statistics: LayerStatistics, constants: Constants) -> Spectrum:
    """What the rotary slots of a layer are worth, see `Spectrum`."""
    spec = weights.spec
    heads, pairs = spec.num_key_value_heads, spec.head_dim // 2
    frequency = near(heads, pairs)
    gain, missed_NPS = slot_gains(weights, statistics, frequency)
    energy_NPS = _query_energy(weights, statistics)[:, frequency]
    bare, moved = (
        (energy_NPS * share).unflatten(0, (heads, -1)).sum(1).permute(1, 2, 0)
        for share in (constants.residual[:, frequency], missed_NPS)
    )
    moment = key_moment(weights, statistics)
    return Spectrum(moment=moment, frequency=frequency, bare=bare, moved=moved, gain=gain)


def _query_energy(weights: LayerWeights, statistics: LayerStatistics) -> Float[Tensor, "N P"]:
    """E|q_n,l|^2."""
    flat = weights.query.flatten(0, 1)
    energy = ((flat @ statistics.second_moment) * flat).sum(1)
    if weights.query_bias is not None:
        bias = weights.query_bias.flatten()
        energy = energy + 2 * bias * (flat @ statistics.mean) + bias.square()
    return energy.unflatten(0, (weights.spec.num_attention_heads, 2, -1)).sum(1)


def key_moment(weights: LayerWeights, statistics: LayerStatistics) -> Complex[Tensor, "P G P G"]:
    """`E[k k^H]` over frequencies and KV heads."""
    heads, pairs = weights.spec.num_key_value_heads, weights.spec.head_dim // 2
    bias = None if weights.key_bias is None else weights.key_bias.flatten()
    moment = statistics.output_moment(weights.key.flatten(0, 1), bias).view(heads, 2, pairs, heads, 2, pairs)
    real = moment[:, 0, :, :, 0] + moment[:, 1, :, :, 1]
    imaginary = moment[:, 1, :, :, 0] - moment[:, 0, :, :, 1]
    return torch.complex(real, imaginary).permute(1, 0, 3, 2)


def _complex(
    weight_hdD: Float[Tensor, "h d D"], bias_hd: Float[Tensor, "h d"] | None = None
) -> Complex[Tensor, "h P *"]:
    """Rotary pairs as complex numbers, row l + i row (l + P), and their bias as one more column."""
    if bias_hd is not None:
        weight_hdD = torch.cat((weight_hdD, bias_hd[..., None]), dim=-1)
    return torch.complex(*weight_hdD.chunk(2, dim=1))


def _real(
    z: Complex[Tensor, "h p *"], bias: Tensor | None
) -> tuple[Float[Tensor, "h 2*p D"], Float[Tensor, "h 2*p"] | None]:
    """The way back; the bias apart, if there is one."""
    rows = torch.cat((z.real, z.imag), dim=-2)
    return (rows, None) if bias is None else (rows[..., :-1], rows[..., -1])
