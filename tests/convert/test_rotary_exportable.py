"""The strategies that stock DeepSeek code can express."""

import itertools
from dataclasses import replace

import pytest
import torch

from kvfold.convert import rotary_exportable
from kvfold.convert.rotary import LAYOUTS
from kvfold.convert.rotary_constants import best_constants
from kvfold.convert.rotary_exportable import assigned, fastest, rorope, stride
from kvfold.convert.rotary_mixing import TRIALS, spectrum_of


def components(choice, weights, statistics, pairs):
    return choice(spectrum_of(weights, statistics, best_constants(weights, statistics)), pairs)


def test_slots_are_those_of_the_stock_code(make_layer, observe, hidden):
    weights = make_layer(head_dim=12)
    statistics = observe(weights, hidden)
    for pairs in (1, 2, 3, 6):
        even = list(range(0, 6, 6 // pairs))
        for choice, slots in ((stride, even), (assigned, even), (fastest, list(range(pairs)))):
            assert sorted(components(choice, weights, statistics, pairs).slot.tolist()) == slots


@pytest.mark.parametrize("name", ["stride", "assigned", "fastest"])
def test_rotary_dims_are_written_in_the_order_of_the_slots(make_layer, observe, hidden, name):
    weights = make_layer(head_dim=12)
    split = LAYOUTS["shared"].strategies[name].split(weights, observe(weights, hidden), 3)
    assert split.index[0].tolist() == sorted(split.index[0].tolist())


def test_stride_keeps_the_strongest_component_of_a_frequency(make_layer, observe, hidden):
    """Keys that are the same in both heads are one component: nothing of it is left without rotation."""
    weights = make_layer(biases=False)
    alike = replace(weights, key=weights.key[:1].repeat(2, 1, 1))
    split = LAYOUTS["shared"].strategies["stride"].split(alike, observe(alike, hidden), 2)
    rest = split.key_nope.unflatten(1, (2, -1))
    torch.testing.assert_close(rest[:, :, [0, 2]], torch.zeros(2, 2, 2, 12).double())
    torch.testing.assert_close(rest[:, :, [1, 3]], alike.key.unflatten(1, (2, -1))[:, :, [1, 3]])


def test_assigned_takes_what_is_off_the_slots(make_layer, observe, hidden):
    """With all keys on frequencies 1 and 3, the slots 0 and 2, which turn nearly alike, hold those."""
    weights = make_layer(biases=False)
    weights = replace(weights, frequency=torch.tensor([1.0, 0.99, 0.012, 0.01]).double())
    size = torch.tensor([1e-4, 1, 1e-4, 1]).double().repeat(2)
    alike = replace(weights, key=(weights.key[:1] * size[:, None]).repeat(2, 1, 1))
    strategies = LAYOUTS["shared"].strategies
    statistics = observe(alike, hidden)
    left = {name: strategies[name].split(alike, statistics, 2).key_nope for name in ("assigned", "stride")}
    assert float(left["assigned"].square().sum()) < 1e-6 * float(left["stride"].square().sum())


def energy_of(spectrum, order, **choices):
    """What the slots take in this order, each the strongest component that is left, by a dense moment."""
    moment, total = spectrum.moment.flatten(2).flatten(0, 1), 0.0
    for slot in order:
        root = torch.zeros(spectrum.moment.shape[:2]).double()
        root[spectrum.frequency[slot]] = spectrum.worth(**choices)[slot].sqrt()
        root = root.flatten()
        values, vectors = torch.linalg.eigh(root[:, None] * moment * root)
        synthesis = torch.where(root > 1e-6 * root.max(), vectors[:, -1] / root.clamp_min(1e-12), 0)
        keep = torch.eye(len(root)) - torch.outer(synthesis, vectors[:, -1].conj() * root)
        moment, total = keep @ moment @ keep.mH, total + float(values[-1])
    return total


@pytest.mark.parametrize("choices", TRIALS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_no_order_of_the_slots_takes_much_more(make_layer, observe, hidden, kv_heads, choices):
    """Which slot a component goes to, against all orders: the best one where slots have no neighbour in common."""
    weights = make_layer(head_dim=12, kv_heads=kv_heads)
    statistics = observe(weights, hidden)
    spectrum = spectrum_of(weights, statistics, best_constants(weights, statistics))
    found = energy_of(spectrum, assigned(spectrum, 3, **choices).slot.tolist(), **choices)
    best = max(energy_of(spectrum, order, **choices) for order in itertools.permutations((0, 2, 4)))
    assert found > (1 - 1e-9 if choices["reach"] == 0 else 0.95) * best


@pytest.mark.parametrize(("name", "slots"), [("stride", (0, 3)), ("fastest", (0, 1))])
def test_no_other_components_of_the_slots_take_more(make_layer, observe, hidden, name, slots):
    weights = make_layer(head_dim=12)
    weights = replace(weights, frequency=0.97 ** torch.arange(6).double())  # neighbours are worth something
    statistics = observe(weights, hidden)
    spectrum = spectrum_of(weights, statistics, best_constants(weights, statistics))
    chosen = {"stride": stride, "fastest": fastest}[name](spectrum, 2)
    for row, slot in enumerate(chosen.slot.tolist()):
        place = spectrum.frequency[slot].tolist().index(slot)
        assert chosen.analysis[row].any(0).nonzero().tolist() == [[place]]  # of its own frequency alone
        worth, moment = spectrum.bare[slot, place], spectrum.moment[slot, :, slot]

        def saved(analysis, worth=worth, moment=moment):
            """With the synthesis that suits it best: of `E|D(r - s a r)|^2`, what the component explains."""
            cached = analysis @ moment @ analysis.conj()
            synthesis = moment @ analysis.conj() / cached
            rest = torch.eye(2) - torch.outer(synthesis, analysis)
            left = (rest @ moment @ rest.mH).diagonal().real
            return float((worth * (moment.diagonal().real - left)).sum())

        best = saved(chosen.analysis[row, :, place])
        for seed in range(50):
            other = torch.randn(2, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))
            assert saved(other) <= best * (1 + 1e-9)
    assert set(chosen.slot.tolist()) == set(slots)


@pytest.mark.parametrize("fold", [1, 2, 4])
def test_rorope_turns_by_orthonormal_components_in_order(make_layer, observe, hidden, monkeypatch, fold):
    seen = []

    def record(weights, chosen, constants):
        seen.append(chosen)
        return original(weights, chosen, constants)

    original = rotary_exportable.split_by_components
    monkeypatch.setattr(rotary_exportable, "split_by_components", record)
    weights = make_layer(head_dim=16)
    statistics = observe(weights, hidden)
    rorope(fold)(weights, statistics, 4)
    (chosen,) = seen
    assert chosen.slot.tolist() == [0, 2, 4, 6]
    assert chosen.frequency.shape == (4, 2 * fold)
    assert chosen.gain is None
    x = hidden.flatten(0, 1).double()
    keys = (torch.einsum("td,hcd->thc", x, weights.key) + weights.key_bias).unflatten(-1, (2, -1))
    for first in range(0, 4, fold):
        group, basis = chosen.frequency[first], chosen.analysis[first : first + fold].flatten(1)
        assert group.tolist() == list(range(2 * first, 2 * first + 2 * fold))
        torch.testing.assert_close(basis @ basis.mH, torch.eye(fold).to(basis.dtype))
        assert not basis.imag.any()
        # They are the principal components of real and imaginary parts, taken alike.
        parts = keys[:, :, :, group].transpose(1, 2).flatten(2)  # (t, part, G f)
        moment = torch.einsum("tpa,tpb->ab", parts, parts) / len(x)
        energy = (basis.real @ moment @ basis.real.T).diagonal()
        torch.testing.assert_close(energy, torch.linalg.eigvalsh(moment).flip(0)[:fold], rtol=1e-4, atol=1e-5)
