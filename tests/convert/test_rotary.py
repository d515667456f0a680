"""Which rotary components are kept, and that keeping all of them changes nothing."""

from dataclasses import replace

import pytest
import torch

from kvfold.convert.attention_moments import ROW_STEP, near
from kvfold.convert.rotary import LAYOUTS
from kvfold.convert.rotary_constants import best_constants, identity, slot_gains
from kvfold.convert.rotary_selection import SELECTIONS, split_by_pairs
from kvfold.convert.statistics import LayerStatistics


def scores(weights, split, x, frozen=False):
    """Scores of every query head from the parts of a split, each token at its own position, or all at position zero."""
    width = split.query_nope.shape[1] + split.query_rope.shape[1]
    angle = (0 if frozen else 1) * torch.arange(len(x)).double()[:, None] * weights.frequency

    def turned(rows, bias, index):
        y = x @ rows.T + (0 if bias is None else bias)
        pairs = torch.complex(*y.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)[:, index]
        return pairs * weights.rope_gain**0.5

    result = []
    for n in range(weights.spec.num_attention_heads):
        g = n // weights.spec.query_groups
        r = g if len(split.index) > 1 else 0
        query = turned(split.query_rope[n], _row(split.query_rope_bias, n), split.index[r])
        key = turned(split.key_rope[r], _row(split.key_rope_bias, r), split.index[r])
        rotary = (query @ key.conj().T).real
        content = x @ split.query_nope[n].T
        if split.query_nope_bias is not None:
            content = content + split.query_nope_bias[n]
        content = content @ (x @ split.key_nope[g].T).T
        result.append((rotary + content) * width**-0.5)
    return torch.stack(result)


def _row(bias, index):
    return None if bias is None else bias[index]


# The sets of arXiv 2502.14837 at its default for head dim 64: r = 4 of 32 pairs.
PUBLISHED = {"high": [0, 1, 2, 3], "low": [28, 29, 30, 31], "uniform": [0, 8, 16, 24]}


STRATEGIES = [(layout, name) for layout in LAYOUTS for name in LAYOUTS[layout].strategies]


@pytest.mark.parametrize("strategy", PUBLISHED)
def test_published_index_sets(make_layer, strategy):
    weights = make_layer(head_dim=64, heads=9, kv_heads=3)
    chosen = SELECTIONS[strategy](weights, LayerStatistics.white(12), 4)
    assert chosen.tolist() == [PUBLISHED[strategy]] * 3


def test_full_keeps_every_pair(make_layer):
    assert SELECTIONS["full"](make_layer(), LayerStatistics.white(12), 4).tolist() == [[0, 1, 2, 3]] * 2


def test_two_norm_is_the_product_of_mean_lengths_before_rotation(make_layer, observe, hidden):
    weights = make_layer()
    x = hidden.flatten(0, 1).double()
    norms = []
    for rows, bias in ((weights.query, weights.query_bias), (weights.key, weights.key_bias)):
        y = torch.einsum("td,hcd->thc", x, rows) + bias
        norms.append(torch.complex(*y.chunk(2, dim=-1)).abs().mean(0))
    score = norms[0].unflatten(0, (2, 2)).sum(1) * norms[1]
    chosen = SELECTIONS["2-norm"](weights, observe(weights, hidden), 2)
    assert chosen.tolist() == [sorted(row.topk(2).indices.tolist()) for row in score]


def test_rotation_error_keeps_what_a_constant_misses_most(make_layer, observe, hidden):
    weights = make_layer()
    statistics = observe(weights, hidden)
    split = LAYOUTS["per_head"].strategies["rotation_error"].split(weights, statistics, 2)
    missed = best_constants(weights, statistics).residual_energy
    for group in range(2):
        best = (missed[2 * group] + missed[2 * group + 1]).topk(2).indices.sort().values
        assert torch.equal(split.index[group], best)


def test_moments(make_layer, observe, hidden):
    weights = make_layer()
    statistics, x = observe(weights, hidden), hidden.flatten(0, 1).double()
    assert statistics.tokens == len(x) == 100
    torch.testing.assert_close(statistics.second_moment, x.T @ x / len(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(statistics.mean, x.mean(0), rtol=1e-5, atol=1e-6)
    y = x @ weights.key.flatten(0, 1).T + weights.key_bias.flatten()
    moment = statistics.output_moment(weights.key.flatten(0, 1), weights.key_bias.flatten())
    torch.testing.assert_close(moment, y.T @ y / len(x), rtol=1e-5, atol=1e-5)


def all_pairs(weights):
    """The original's keys and queries as a split: everything rotated, nothing chosen."""
    spec = weights.spec
    index = torch.arange(spec.head_dim // 2).repeat(spec.num_key_value_heads, 1)
    return split_by_pairs(weights, index, identity(weights))


@pytest.mark.parametrize(("layout", "strategy"), STRATEGIES)
@pytest.mark.parametrize(("biases", "gain", "kv_heads"), [(False, 1.0, 2), (True, 1.3, 2), (True, 1.0, 1)])
def test_every_component_kept_is_exact(make_layer, observe, hidden, layout, strategy, biases, gain, kv_heads):
    method = LAYOUTS[layout].strategies[strategy]
    weights = make_layer(biases=biases, rope_gain=gain, kv_heads=kv_heads)
    everything = LAYOUTS[layout].full_rope_dim(weights.spec) // 2
    x = hidden[0].double()
    for statistics in (observe(weights, hidden), *(() if method.required else (LayerStatistics.white(12),))):
        split = method.split(weights, statistics, everything)
        assert split.key_nope.shape == (kv_heads, 0, 12)
        torch.testing.assert_close(scores(weights, split, x), scores(weights, all_pairs(weights), x))


@pytest.mark.parametrize("gain", [1.0, 1.3])
@pytest.mark.parametrize(("layout", "strategy"), [pair for pair in STRATEGIES if pair[1] != "assigned"])
def test_where_rotation_does_nothing_nothing_is_lost(make_layer, observe, hidden, layout, strategy, gain):
    """Without the original's attention there are no constants, and at position zero both parts together give its
    scores, up to what a softmax ignores: the key bias of the part without rotation, one number per query.
    (`assigned` has the gains of other distances.)"""
    weights = make_layer(rope_gain=gain)
    statistics = replace(observe(weights, hidden), attention=None)
    split = LAYOUTS[layout].strategies[strategy].split(weights, statistics, 2)
    x = hidden[0].double()
    kept, expected = (scores(weights, part, x, frozen=True).softmax(-1) for part in (split, all_pairs(weights)))
    torch.testing.assert_close(kept, expected)


def unturned(weights, statistics):
    """Only pair 0 keeps its rotation; pair 1 gets constants."""
    return split_by_pairs(weights, torch.tensor([[0]]), best_constants(weights, statistics))


def turned_elsewhere(weights, statistics):
    """The only slot is that of frequency 0; pair 1 is rotated there."""
    return LAYOUTS["shared"].strategies["assigned"].split(weights, statistics, 1, reach=1, price=1.0)


MISSED = {
    "constants": (unturned, lambda weights, statistics: best_constants(weights, statistics).residual[:, 1]),
    "gains": (turned_elsewhere, lambda weights, statistics: slot_gains(weights, statistics, near(1, 4))[1][:, 0, 1]),
}


@pytest.mark.parametrize("gain", [1.0, 1.3])
@pytest.mark.parametrize("replacement", MISSED)
def test_scores_miss_as_much_as_was_predicted(make_layer, observe, replacement, gain):
    """With all keys at one pair: the variance of the score error under the original's attention, as a share."""
    weights = make_layer(heads=2, kv_heads=1, biases=False, rope_gain=gain)
    keys = torch.zeros_like(weights.key)
    keys[:, [1, 5]] = weights.key[:, [1, 5]]
    weights = replace(weights, key=keys, frequency=torch.tensor([0.14, 0.1, 0.05, 0.01]).double())
    hidden = torch.randn(ROW_STEP, 30, 12, generator=torch.Generator().manual_seed(5))
    statistics = observe(weights, hidden)
    split, predicted = (method(weights, statistics) for method in MISSED[replacement])
    error, energy = torch.zeros(2).double(), torch.zeros(2).double()
    for window, x in enumerate(hidden.double()):
        rows = slice(window % ROW_STEP, None, ROW_STEP)
        seen = torch.ones(30, 30, dtype=torch.bool).tril()
        expected = scores(weights, all_pairs(weights), x)
        attention = expected.masked_fill(~seen, -torch.inf).softmax(-1)[:, rows]
        missed = (scores(weights, split, x) - expected)[:, rows]
        for total, part in ((error, missed), (energy, expected[:, rows])):
            centred = part - (attention * part).sum(-1, keepdim=True)
            total += (attention * centred.square()).sum((1, 2))
    assert bool((predicted > 0.01).all() and (predicted < 0.9).all())
    torch.testing.assert_close(error / energy, predicted, rtol=1e-3, atol=0)


def test_dims_of_a_layout(make_layer):
    spec = make_layer(head_dim=64, heads=9, kv_heads=3).spec
    shared, per_head = LAYOUTS["shared"], LAYOUTS["per_head"]
    assert (shared.full_rope_dim(spec), per_head.full_rope_dim(spec)) == (192, 64)
    assert (shared.nope_dim(spec, 24), shared.nope_dim(spec, 192)) == (64, 0)
    assert (per_head.nope_dim(spec, 8), per_head.nope_dim(spec, 64)) == (56, 0)
    assert (shared.rotary_heads(spec), per_head.rotary_heads(spec)) == (1, 3)
