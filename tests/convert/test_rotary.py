"""Which rotary components are kept, and that keeping all of them changes nothing."""

import pytest
import torch

from kvfold.attention import GroupedSpec
from kvfold.convert.rotary import LAYOUTS
from kvfold.convert.rotary_mixing import split_by_components
from kvfold.convert.rotary_selection import SELECTIONS, split_by_pairs
from kvfold.convert.statistics import LayerStatistics, StatisticsAccumulator
from kvfold.convert.weights import LayerWeights


def layer(head_dim=8, heads=4, kv_heads=2, width=12, biases=True, rope_gain=1.0):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    spec = GroupedSpec(
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        query_bias=biases,
        key_bias=biases,
    )
    return LayerWeights(
        spec=spec,
        query=normal(heads, head_dim, width),
        key=normal(kv_heads, head_dim, width),
        value=normal(kv_heads, head_dim, width),
        output=normal(width, heads * head_dim),
        query_bias=normal(heads, head_dim) if biases else None,
        key_bias=normal(kv_heads, head_dim) if biases else None,
        rope_gain=rope_gain,
    )


def observed(weights, tokens=50):
    accumulator = StatisticsAccumulator(weights)
    x = torch.randn(2, tokens, weights.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    accumulator.update(x[:1] + 0.5)
    accumulator.update(x[1:] + 0.5)
    return accumulator.finish(), (x + 0.5).flatten(0, 1).double()


def scores(weights, split, x, frozen=False):
    """Scores of every query head from the parts of a split, each token at its own position, or all at position zero."""
    width = split.query_nope.shape[1] + split.query_rope.shape[1]
    angle = (
        (0 if frozen else 1) * torch.arange(len(x)).double()[:, None] * 0.5 ** torch.arange(weights.spec.head_dim // 2)
    )

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


@pytest.mark.parametrize("strategy", PUBLISHED)
def test_published_index_sets(strategy):
    weights = layer(head_dim=64, heads=9, kv_heads=3)
    chosen = SELECTIONS[strategy](weights, LayerStatistics.white(12), 4)
    assert chosen.tolist() == [PUBLISHED[strategy]] * 3


def test_full_keeps_every_pair():
    assert SELECTIONS["full"](layer(), LayerStatistics.white(12), 4).tolist() == [[0, 1, 2, 3]] * 2


def test_two_norm_is_the_product_of_mean_lengths_before_rotation():
    weights = layer()
    statistics, x = observed(weights)
    norms = []
    for rows, bias in ((weights.query, weights.query_bias), (weights.key, weights.key_bias)):
        y = torch.einsum("td,hcd->thc", x, rows) + bias
        norms.append(torch.complex(*y.chunk(2, dim=-1)).abs().mean(0))
    score = norms[0].unflatten(0, (2, 2)).sum(1) * norms[1]
    chosen = SELECTIONS["2-norm"](weights, statistics, 2)
    assert chosen.tolist() == [sorted(row.topk(2).indices.tolist()) for row in score]


def test_moments():
    weights = layer()
    statistics, x = observed(weights)
    assert statistics.tokens == len(x) == 100
    torch.testing.assert_close(statistics.second_moment, x.T @ x / len(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(statistics.mean, x.mean(0), rtol=1e-5, atol=1e-6)
    y = x @ weights.key.flatten(0, 1).T + weights.key_bias.flatten()
    moment = statistics.output_moment(weights.key.flatten(0, 1), weights.key_bias.flatten())
    torch.testing.assert_close(moment, y.T @ y / len(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("gain", [1.0, 1.3])
def test_every_component_kept_is_exact_in_both_layouts(biases, gain):
    weights = layer(biases=biases, rope_gain=gain)
    statistics, x = observed(weights)
    everything = split_by_pairs(weights, torch.arange(4).repeat(2, 1))
    expected = scores(weights, everything, x)
    mixed = split_by_components(weights, statistics, 8)
    assert mixed.key_nope.shape == (2, 0, 12)
    assert sorted(mixed.index[0].tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(scores(weights, mixed, x), expected)


@pytest.mark.parametrize("gain", [1.0, 1.3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_rotation_does_nothing_nothing_is_lost(layout, gain):
    """At position zero both parts together give the original's scores, up to what a softmax ignores: the key bias of
    the part without rotation, one number per query."""
    weights = layer(rope_gain=gain)
    statistics, x = observed(weights)
    split = LAYOUTS[layout].strategies[LAYOUTS[layout].default](weights, statistics, 2)
    everything = split_by_pairs(weights, torch.arange(4).repeat(2, 1))
    kept, expected = (scores(weights, part, x, frozen=True).softmax(-1) for part in (split, everything))
    torch.testing.assert_close(kept, expected)


def test_dims_of_a_layout():
    spec = layer(head_dim=64, heads=9, kv_heads=3).spec
    shared, per_head = LAYOUTS["shared"], LAYOUTS["per_head"]
    assert (shared.full_rope_dim(spec), per_head.full_rope_dim(spec)) == (192, 64)
    assert (shared.default_rope_dim(spec), per_head.default_rope_dim(spec)) == (24, 8)
    assert (shared.nope_dim(spec, 24), shared.nope_dim(spec, 192)) == (64, 0)
    assert (per_head.nope_dim(spec, 8), per_head.nope_dim(spec, 64)) == (56, 0)
    assert (shared.rotary_heads(spec), per_head.rotary_heads(spec)) == (1, 3)
