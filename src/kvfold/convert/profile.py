"""What each layer needs: measured once at one budget, predicted for all others, and shared out among the layers."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvfold.convert.calibration import ORIGINAL, LayerRunner
from kvfold.convert.factorize import metric_spectrum
from kvfold.convert.layers import LOW_RANK, ROTARY, LayerConverter
from kvfold.convert.plan import Plan
from kvfold.convert.rotary_constants import best_constants
from kvfold.convert.rotary_mixing import TRIALS, Spectrum, greedy, spectrum_of
from kvfold.progress import Progress

RANK_STEP = 4
LEAST_RANK = 4


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer at the budget that was tried: `rope_dim` rotary dims and latent rank `rank`.

    `divergence` is the KL divergence, in nats per token, of the model with only this layer converted; `rotary_share`
    the part of the layer's attention error that the rotary stage alone makes. `rotary_rest[p]` is the energy of rotary
    components beyond the p largest, `rank_rest[r]` the error of a latent of rank r, both as shares.
    """

    rope_dim: int
    rank: int
    divergence: float
    rotary_share: float
    rotary_rest: Float[Tensor, " components"]
    rank_rest: Float[Tensor, " ranks"]

    def predict(self, rope_dim: int, rank: int) -> float:
        """Nats per token that this layer alone would cost at another budget: both errors scaled by what is left out."""
        rotary = _ratio(self.rotary_rest, rope_dim // 2, self.rope_dim // 2)
        low_rank = _ratio(self.rank_rest, rank, self.rank)
        return self.divergence * (self.rotary_share * rotary + (1 - self.rotary_share) * low_rank)


def _ratio(rest: Tensor, wanted: int, tried: int) -> float:
    last = len(rest) - 1
    return float(rest[min(wanted, last)] / rest[min(tried, last)].clamp_min(1e-12))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All layers at one budget. `original` is the loss of the original on the probe text, in nats per token, and
    `compounding` how much more the layers cost together than the sum of what each costs alone."""

    layers: tuple[LayerProfile, ...]
    original: float
    compounding: float

    def predict(self, rope_dim: int, ranks: Sequence[int]) -> float:
        """Nats per token that a conversion to these ranks would cost in one shot."""
        alone = sum(layer.predict(rope_dim, rank) for layer, rank in zip(self.layers, ranks, strict=True))
        return self.compounding * alone


def profile_model(converter: LayerConverter, runner: LayerRunner, plan: Plan, progress: Progress) -> Profile:
    """Convert every layer in one shot, alone and together with those below, and measure what it costs.

    The plan's rope strategy must be `mixed`, its factorisation `attention_aware`.
    """
    pieces = []
    for index, layer in enumerate(plan.layers):
        trial = converter.try_layer(index)
        runner.branch(index, trial.attention)
        runner.drop_layer()
        constants = best_constants(trial.weights, trial.statistics)
        spectrum = spectrum_of(trial.weights, trial.statistics, constants)
        share = trial.errors[ROTARY] / max(trial.errors[LOW_RANK], 1e-12)
        pieces.append(
            LayerProfile(
                rope_dim=layer.target.qk_rope_head_dim,
                rank=layer.target.kv_lora_rank,
                divergence=0.0,
                rotary_share=min(share, 1.0),
                rotary_rest=_rotary_rest(spectrum),
                rank_rest=_rank_rest(metric_spectrum(trial.split, trial.weights, trial.statistics)),
            )
        )
        progress("profiling layers", index + 1, len(plan.layers))
    divergences = [max(divergence, 0.0) for divergence in runner.branch_divergences()]
    losses = runner.probe_losses()
    together = max(losses[LOW_RANK] - losses[ORIGINAL], 0.0)
    return Profile(
        layers=tuple(replace(piece, divergence=value) for piece, value in zip(pieces, divergences, strict=True)),
        original=losses[ORIGINAL],
        compounding=together / max(sum(divergences), 1e-12),
    )


def _rotary_rest(spectrum: Spectrum) -> Float[Tensor, " components"]:
    """The energy that is missed with the first p components, for the reach that is best for that p."""
    total, slots = spectrum.energy(), range(len(spectrum.frequency))
    pairs = spectrum.bare.shape[2] * len(slots)
    taken = torch.stack([greedy(spectrum, pairs, slots, **choices)[1].double().cumsum(0) for choices in TRIALS])
    left = (1 - taken.amax(0) / total).clamp_min(0)
    return torch.cat((left.new_ones(1), left))


def _rank_rest(energies: Float[Tensor, " n"]) -> Float[Tensor, " ranks"]:
    """The share of all but the first r."""
    energies = energies.clamp_min(0).double()
    beyond = torch.cat((energies.flip(0).cumsum(0).flip(0), energies.new_zeros(1)))
    return beyond / beyond[0].clamp_min(torch.finfo(torch.float64).tiny)


def plan_per_layer(plan: Plan, profile: Profile) -> Plan:
    """The plan with the latent ranks shared among the layers by what each needs, as much in all as before."""
    target = plan.layers[0].target
    return plan.with_ranks(share_ranks(profile.layers, target.qk_rope_head_dim, target.kv_lora_rank))


def share_ranks(profiles: Sequence[LayerProfile], rope_dim: int, rank: int) -> list[int]:
    """Latent ranks, `rank` on average, that make the sum of the predicted costs least: the greedy choice, a few ranks
    at a time to the layer that wins most, which is optimal because every layer wins less and less."""
    ranks = [min(LEAST_RANK, rank)] * len(profiles)
    left = rank * len(profiles) - sum(ranks)

    def offer(layer: int) -> tuple[float, int]:
        profile, now = profiles[layer], ranks[layer]
        return profile.predict(rope_dim, now + RANK_STEP) - profile.predict(rope_dim, now), layer

    offers = [offer(layer) for layer in range(len(profiles))]
    heapq.heapify(offers)
    while left >= RANK_STEP and offers:
        _, layer = heapq.heappop(offers)
        if ranks[layer] + RANK_STEP < len(profiles[layer].rank_rest):
            ranks[layer] += RANK_STEP
            left -= RANK_STEP
            heapq.heappush(offers, offer(layer))
    return ranks
