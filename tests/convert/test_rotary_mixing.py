"""The components that are kept: strongest first, across heads and nearby frequencies."""

from dataclasses import replace

import pytest
import torch

from kvfold.convert.rotary_constants import best_constants, slot_gains
from kvfold.convert.rotary_mixing import TRIALS, greedy, spectrum_of


def spectrum(weights, statistics):
    return spectrum_of(weights, statistics, best_constants(weights, statistics))


def test_at_the_own_frequency_components_are_eigenvectors(make_layer, observe, hidden):
    """Without neighbours, the energies are the eigenvalues of every frequency's own problem, largest first."""
    weights = make_layer()
    whole = spectrum(weights, observe(weights, hidden))
    own = [
        torch.linalg.eigvalsh(root[:, None] * whole.moment[slot, :, slot] * root)
        for slot, root in enumerate(whole.worth(reach=0).sum(1).sqrt())
    ]
    _, energies = greedy(whole, 8, range(4), reach=0)
    torch.testing.assert_close(energies.double(), torch.cat(own).sort(descending=True).values)
    assert float(energies.sum()) == pytest.approx(whole.energy())


@pytest.mark.parametrize("choices", TRIALS)
def test_every_choice_is_the_best_that_is_left(make_layer, observe, hidden, choices):
    """Against a loop that deflates a dense moment and asks every slot every time."""
    weights = make_layer(head_dim=12)
    whole = spectrum(weights, observe(weights, hidden))
    slots, heads = len(whole.frequency), whole.bare.shape[2]
    moment = whole.moment.flatten(2).flatten(0, 1)
    expected = []
    for _ in range(7):
        offers = []
        for slot in range(slots):
            root = torch.zeros(slots, heads).double()
            root[whole.frequency[slot]] = whole.worth(**choices)[slot].sqrt()
            root = root.flatten()
            values, vectors = torch.linalg.eigh(root[:, None] * moment * root)
            offers.append((float(values[-1]), slot, vectors[:, -1], root))
        _, slot, vector, root = max(offers, key=lambda offer: offer[0])
        synthesis = torch.where(root > 1e-6 * root.max(), vector / root.clamp_min(1e-12), 0)
        keep = torch.eye(len(root)) - torch.outer(synthesis, vector.conj() * root)
        moment = keep @ moment @ keep.mH
        expected.append(slot)
    assert greedy(whole, 7, range(slots), **choices)[0].slot.tolist() == expected


def test_gains_are_the_least_squares_ones(make_layer, observe, hidden):
    """At the own frequency nothing is missed, elsewhere never more than all, and no other gain misses less."""
    weights = make_layer()
    statistics = observe(weights, hidden)
    frequency = spectrum(weights, statistics).frequency
    gain, missed = slot_gains(weights, statistics, frequency)
    own = frequency == torch.arange(4)[:, None]
    assert not missed[:, own].any()
    assert bool((gain[:, own] == 1).all())
    assert bool(((missed >= 0) & (missed <= 1)).all())
    moments = statistics.attention
    for step in (0.05, -0.05, 0.05j, -0.05j):
        other = gain + step
        x = torch.stack((other.real, -other.imag), dim=-1)
        explained = 2 * (x * moments.slot_target).sum(-1) - torch.einsum(
            "npsa,npsab,npsb->nps", x, moments.slot_gram, x
        )
        worse = 1 - explained / moments.rotated_energy[:, frequency]
        assert bool((worse >= missed - 1e-6)[:, ~own].all())


def test_without_text_only_the_own_frequency_counts(make_layer, observe, hidden):
    weights = make_layer()
    statistics = replace(observe(weights, hidden), attention=None)
    whole = spectrum(weights, statistics)
    assert not whole.worth(reach=2, price=1.0)[whole.frequency != torch.arange(4)[:, None]].any()
