"""Low rank: optimal where a theorem says what the optimum is."""

from dataclasses import replace

import pytest
import torch

from kvfold.attention import GroupedSpec
from kvfold.convert.factorize import (
    DAMPING,
    FACTORIZATIONS,
    READ_SHARE,
    ROOT_DAMPING,
    VALUE_BALANCE,
    Metric,
    attention_aware,
    factorize,
    metric_spectrum,
    reduced_rank,
    svd_joint,
    svd_split,
    svd_whitened,
)
from kvfold.convert.rotary import LAYOUTS
from kvfold.convert.statistics import LayerStatistics
from kvfold.convert.weights import LayerWeights, RotarySplit

SHAPES = {"wide": (10, 24), "square": (12, 12), "tall": (24, 10)}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment_of(width):
    x = normal(200, width, seed=1) * torch.logspace(0, -2, width, dtype=torch.float64)
    return x.T @ x / 200


def statistics(width, tokens=200):
    zeros = torch.zeros(width, dtype=torch.float64)
    return LayerStatistics(second_moment=moment_of(width), mean=zeros, query_norm=None, key_norm=None, tokens=tokens)


def folded(method, key, value, rank):
    """The factors of a layer of two heads with these NoPE keys and values."""
    width, value_width = key.shape[1], len(value) // 2
    spec = GroupedSpec(hidden_size=width, num_attention_heads=4, num_key_value_heads=2, head_dim=value_width)
    nothing = normal(4, 0, width)
    split = RotarySplit(
        index=torch.zeros(1, 0, dtype=torch.int64),
        query_rope=nothing,
        query_nope=normal(4, len(key) // 2, width, seed=5),
        key_rope=nothing[:1],
        key_nope=key.view(2, len(key) // 2, width),
    )
    weights = LayerWeights(
        spec=spec,
        query=normal(4, value_width, width),
        key=normal(2, value_width, width),
        value=value.view(2, value_width, width),
        output=normal(width, 4 * value_width, seed=6),
    )
    return FACTORIZATIONS[method](split, weights, statistics(width), rank)


def squared_error(weight, down, up, moment=None):
    """`E|W x - up down x|^2`."""
    rest = weight - up @ down
    return float(torch.trace(rest @ (torch.eye(weight.shape[1]).double() if moment is None else moment) @ rest.T))


@pytest.mark.parametrize("method", FACTORIZATIONS)
@pytest.mark.parametrize("rank", [10, 13])
def test_a_rank_of_the_whole_width_is_exact(method, rank):
    key, value = normal(16, 10), normal(12, 10, seed=2)
    factors = folded(method, key, value, 2 * rank)
    assert factors.down.shape == (2 * rank, 10)
    torch.testing.assert_close(factors.up_key @ factors.down, key)
    torch.testing.assert_close(factors.up_value @ factors.down, value)


@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_weight_of_a_rank(shape, rank):
    weight = normal(*SHAPES[shape])
    down, up = reduced_rank(weight, rank)
    assert (down.shape, up.shape) == ((rank, weight.shape[1]), (len(weight), rank))
    expected = float(torch.linalg.svdvals(weight)[rank:].square().sum())
    assert squared_error(weight, down, up) == pytest.approx(expected, rel=1e-9)
    # The singular values are shared: both factors have the same Gram matrix.
    torch.testing.assert_close(down @ down.T, up.T @ up)


@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_output_of_a_rank(shape, rank):
    weight = normal(*SHAPES[shape])
    moment = moment_of(weight.shape[1])
    down, up = reduced_rank(weight, rank, moment)
    damped = moment + DAMPING * moment.diagonal().mean() * torch.eye(len(moment)).double()
    values, vectors = torch.linalg.eigh(damped)
    optimum = float(torch.linalg.svdvals(weight @ (vectors * values.sqrt()))[rank:].square().sum())
    assert squared_error(weight, down, up, damped) == pytest.approx(optimum, rel=1e-6)


def test_a_moment_of_few_directions():
    weight, x = normal(24, 10), normal(3, 10, seed=1)
    down, up = reduced_rank(weight, 3, x.T @ x)
    torch.testing.assert_close(up @ down @ x.T, weight @ x.T, rtol=0.01, atol=0.01)
    assert down.isfinite().all() and up.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_full_rank_is_exact(shape, calibrated):
    weight = normal(*SHAPES[shape])
    moment = moment_of(weight.shape[1]) if calibrated else None
    for rank in (len(weight), len(weight) + 3):
        down, up = reduced_rank(weight, rank, moment)
        assert (down.shape, up.shape) == ((rank, weight.shape[1]), (len(weight), rank))
        torch.testing.assert_close(up @ down, weight, rtol=0, atol=0)


def test_rank_zero_and_a_zero_weight():
    down, up = reduced_rank(normal(5, 8), 0)
    assert (down.shape, up.shape) == ((0, 8), (5, 0))
    down, up = reduced_rank(torch.zeros(5, 8).double(), 2)
    assert down.isfinite().all() and up.isfinite().all()
    torch.testing.assert_close(up @ down, torch.zeros(5, 8).double())


@pytest.mark.parametrize("method", FACTORIZATIONS)
def test_every_method_has_the_rank_that_was_asked_for(method):
    key, value = normal(6, 20), normal(8, 20, seed=1)
    for rank in (1, 2, 5, 10, 13, 14, 20):
        factors = folded(method, key, value, rank)
        shapes = (factors.down.shape, factors.up_key.shape, factors.up_value.shape)
        assert shapes == ((rank, 20), (6, rank), (8, rank))
        if rank >= 14:
            torch.testing.assert_close(factors.up_key @ factors.down, key)
            torch.testing.assert_close(factors.up_value @ factors.down, value)


@pytest.mark.parametrize("method", FACTORIZATIONS)
def test_without_content_keys_only_values_are_folded(method):
    factors = folded(method, normal(0, 20), normal(8, 20), 5)
    assert factors.up_key.shape == (0, 5)
    assert torch.linalg.matrix_rank(factors.up_value) == 5


def test_joint_is_never_worse_than_split_for_the_weights():
    key, value = normal(8, 20), 3 * normal(8, 20, seed=1)
    errors = {}
    for method in ("svd_joint", "svd_split"):
        factors = folded(method, key, value, 6)
        errors[method] = squared_error(
            torch.cat((key, value)), factors.down, torch.cat((factors.up_key, factors.up_value))
        )
    assert errors["svd_joint"] < errors["svd_split"]


def test_split_halves_the_rank_and_gives_the_rest_away():
    key, value = normal(4, 20), normal(12, 20, seed=1)
    factors = folded("svd_split", key, value, 12)
    torch.testing.assert_close(factors.up_key @ factors.down, key)
    assert int((factors.up_value != 0).any(0).sum()) == 8
    factors = folded("svd_split", value, key, 12)
    torch.testing.assert_close(factors.up_value @ factors.down, key)
    assert int((factors.up_key != 0).any(0).sum()) == 8


def roots(heads, width, seed):
    """Symmetric positive matrices."""
    half = normal(heads, width, width, seed=seed)
    return half @ half.mT + 0.1 * torch.eye(width).double()


def metric_error(split, weights, factors, metric):
    """The error of the metric's definition, head by head."""
    total = 0.0
    heads = len(weights.value)
    for rows, up, root in (
        (split.key_nope, factors.up_key, metric.key_root),
        (weights.value, factors.up_value, metric.value_root),
    ):
        for head, part in enumerate(up.view(heads, -1, up.shape[1])):
            rest = rows[head] - part @ factors.down
            rest = rest if root is None else root[head] @ rest
            total += float((rest @ metric.moment * rest).sum())
    return total


@pytest.mark.parametrize("width", [40, 12])  # more columns than rows, and fewer
@pytest.mark.parametrize("strategy", ["mixed", "rotation_error"])
def test_no_factors_are_closer_in_a_metric(make_layer, width, strategy):
    weights = make_layer(width=width, biases=False)
    layout = "shared" if strategy == "mixed" else "per_head"
    white = LayerStatistics.white(width)
    split = LAYOUTS[layout].strategies[strategy].split(weights, white, 1)
    moment = moment_of(width) + 0.01 * torch.eye(width).double()
    metric = Metric(moment=moment, key_root=roots(2, split.key_nope.shape[1], 1), value_root=roots(2, 8, 2))
    measure = replace(metric, moment=moment + DAMPING * moment.diagonal().mean() * torch.eye(width).double())
    factors = factorize(split, weights, 5, metric)
    best = metric_error(split, weights, factors, measure)
    for seed in range(20):
        for size in (1e-3, 1e-1):
            moved = type(factors)(
                **{name: x * (1 + size * normal(*x.shape, seed=seed)) for name, x in vars(factors).items()}
            )
            assert metric_error(split, weights, moved, measure) > best
    for other in (Metric(), Metric(moment=moment), replace(metric, key_root=None)):
        assert metric_error(split, weights, factorize(split, weights, 5, other), measure) > best


def augmented_moment(statistics):
    """E[(x, 1) (x, 1)^T]."""
    corner = torch.ones(1).double()
    return torch.cat(
        (
            torch.cat((statistics.second_moment, statistics.mean[:, None]), dim=1),
            torch.cat((statistics.mean, corner))[None],
        )
    )


def damped_root(matrix, damping):
    """A root whose transpose is on its left: L^T L is the damped matrix."""
    return torch.linalg.cholesky(matrix + damping * matrix.trace() / len(matrix) * torch.eye(len(matrix)).double()).T


def dense_metric(method, weights, split, statistics):
    """The stacked weights W, and dense L and M: the method's error is `tr(L (W - up down) M (W - up down)^T L^T)`, but
    for the damping of M."""
    keys, values = split.key_nope, weights.value
    moment = statistics.second_moment
    if method == "attention_aware":
        read = statistics.attention.value_moment
        moment = (1 - READ_SHARE) * moment / moment.trace() + READ_SHARE * read / read.trace()
        blocks = {"key": [], "value": []}
        groups = weights.spec.query_groups
        output = weights.output.unflatten(1, (weights.spec.num_attention_heads, -1))
        for group in range(len(keys)):
            of_queries = of_outputs = 0
            for head in range(groups * group, groups * group + groups):
                query = torch.cat((split.query_nope[head], split.query_nope_bias[head][:, None]), dim=1)
                of_queries = of_queries + query @ augmented_moment(statistics) @ query.T
                of_outputs = of_outputs + output[:, head].T @ output[:, head]
            blocks["key"].append(damped_root(of_queries, ROOT_DAMPING))
            blocks["value"].append(damped_root(of_outputs, ROOT_DAMPING))
    else:
        blocks = {name: [torch.eye(rows.shape[1]).double()] * 2 for name, rows in (("key", keys), ("value", values))}
    key_root, value_root = (torch.block_diag(*blocks[name]) for name in ("key", "value"))
    if method != "svd_whitened":
        sizes = [
            torch.trace(root @ rows.flatten(0, 1) @ moment @ rows.flatten(0, 1).T @ root.T)
            for root, rows in ((key_root, keys), (value_root, values))
        ]
        value_root = value_root * (VALUE_BALANCE if method == "attention_aware" else 1) * (sizes[0] / sizes[1]).sqrt()
    return torch.cat((keys.flatten(0, 1), values.flatten(0, 1))), torch.block_diag(key_root, value_root), moment


@pytest.mark.parametrize("width", [40, 12])  # more columns than rows, and fewer
@pytest.mark.parametrize(("layout", "strategy"), [("shared", "mixed"), ("shared", "rorope"), ("per_head", "2-norm")])
@pytest.mark.parametrize("method", ["attention_aware", "svd_whitened", "pca_balanced"])
def test_factors_are_those_of_a_dense_generalised_svd(make_layer, observe, method, layout, strategy, width):
    weights = make_layer(width=width)
    scale = torch.logspace(0, -1, width)
    statistics = observe(weights, normal(2, 50, width, seed=3).float() * scale + 0.3 * scale)
    split = LAYOUTS[layout].strategies[strategy].split(weights, statistics, 2)
    factors = FACTORIZATIONS[method](split, weights, statistics, 7)
    found = torch.cat((factors.up_key, factors.up_value)) @ factors.down
    weight, left, moment = dense_metric(method, weights, split, statistics)
    right = damped_root(moment, DAMPING).T
    u, s, v = torch.linalg.svd(left @ weight @ right)
    best = (u[:, :7] * s[:7]) @ v[:7]
    expected = torch.linalg.solve(left, torch.linalg.solve_triangular(right, best, upper=False, left=False))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    def error(product):
        return float((left @ (weight - product) @ right).square().sum())

    assert error(found) == pytest.approx(float(s[7:].square().sum()), rel=1e-6)
    for seed in range(20):
        moved = [x * (1 + 0.01 * normal(*x.shape, seed=seed)) for x in (factors.up_key, factors.up_value, factors.down)]
        assert error(torch.cat(moved[:2]) @ moved[2]) > error(found)


@pytest.mark.parametrize("width", [40, 12])
def test_the_spectrum_is_what_every_further_rank_removes(make_layer, observe, width):
    weights = make_layer(width=width)
    statistics = observe(weights, normal(4, 50, width, seed=3).float())
    split = LAYOUTS["shared"].strategies["mixed"].split(weights, statistics, 2)
    weight, left, moment = dense_metric("attention_aware", weights, split, statistics)
    removed = torch.linalg.svdvals(left @ weight @ damped_root(moment, 0).T).square()
    found = metric_spectrum(split, weights, statistics)
    torch.testing.assert_close(found[: len(removed)], removed[: len(found)], rtol=1e-6, atol=1e-9)


def test_attention_aware_loses_less_of_scores_and_outputs_than_the_others(make_layer, observe):
    weights = make_layer(width=40)
    hidden = normal(4, 50, 40, seed=3).float() * torch.logspace(0, -1, 40)
    statistics = replace(observe(weights, hidden), attention=None)
    split = LAYOUTS["shared"].strategies["mixed"].split(weights, statistics, 2)
    x = hidden.flatten(0, 1).double()

    def lost(method):
        """Scores of all tokens with all others, and outputs, as shares of the whole; outputs count by the balance."""
        factors = method(split, weights, statistics, 8)
        key, value = (up @ factors.down for up in (factors.up_key, factors.up_value))
        energy = torch.zeros(2, 2).double()
        for head in range(4):
            group = slice(8 * (head // 2), 8 * (head // 2) + 8)
            query = x @ split.query_nope[head].T + split.query_nope_bias[head]
            key_rows, value_rows = split.key_nope[head // 2], weights.value[head // 2]
            output = weights.output[:, 8 * head : 8 * head + 8]
            for kind, (left, rows, kept) in enumerate(((query, key_rows, key), (output, value_rows, value))):
                for part, factor in enumerate((rows - kept[group], rows)):
                    energy[kind, part] += (left @ (factor @ x.T)).square().sum()
        scores, outputs = energy[:, 0] / energy[:, 1]
        return float(scores + VALUE_BALANCE**2 * outputs)

    # Its own measure, but for the damping of the roots.
    assert 1.1 * lost(attention_aware) < min(lost(method) for method in (svd_joint, svd_split, svd_whitened))
