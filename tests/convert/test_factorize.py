"""Low rank: optimal where a theorem says what the optimum is."""

import pytest
import torch

from kvfold.convert.factorize import DAMPING, FACTORIZATIONS, reduced_rank, svd_joint, svd_split
from kvfold.convert.statistics import LayerStatistics

SHAPES = {"wide": (10, 24), "square": (12, 12), "tall": (24, 10)}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment_of(width):
    x = normal(200, width, seed=1) * torch.logspace(0, -2, width, dtype=torch.float64)
    return x.T @ x / 200


def statistics(width, tokens=200):
    zeros = torch.zeros(width, dtype=torch.float64)
    return LayerStatistics(second_moment=moment_of(width), mean=zeros, query_norm=None, key_norm=None, tokens=tokens)


def squared_error(weight, down, up, moment=None):
    """`E|W x - up down x|^2`."""
    rest = weight - up @ down
    return float(torch.trace(rest @ (torch.eye(weight.shape[1]).double() if moment is None else moment) @ rest.T))


@pytest.mark.parametrize("method", FACTORIZATIONS)
@pytest.mark.parametrize("rank", [10, 13])
def test_a_rank_of_the_whole_width_is_exact(method, rank):
    key, value = normal(16, 10), normal(12, 10, seed=2)
    factors = FACTORIZATIONS[method](key, value, 2 * rank, statistics(10))
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
    # Where the moment must be inverted, the optimum is that of the damped one.
    damping = DAMPING * moment.diagonal().mean() if shape == "tall" else 0
    damped = moment + damping * torch.eye(len(moment)).double()
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
        factors = FACTORIZATIONS[method](key, value, rank, statistics(20))
        shapes = (factors.down.shape, factors.up_key.shape, factors.up_value.shape)
        assert shapes == ((rank, 20), (6, rank), (8, rank))
        if rank >= 14:
            torch.testing.assert_close(factors.up_key @ factors.down, key)
            torch.testing.assert_close(factors.up_value @ factors.down, value)


@pytest.mark.parametrize("method", FACTORIZATIONS)
def test_without_content_keys_only_values_are_folded(method):
    factors = FACTORIZATIONS[method](normal(0, 20), normal(8, 20), 5, statistics(20))
    assert factors.up_key.shape == (0, 5)
    assert torch.linalg.matrix_rank(factors.up_value) == 5


def test_joint_is_never_worse_than_split_for_the_weights():
    key, value = normal(8, 20), 3 * normal(8, 20, seed=1)
    errors = {}
    for method in (svd_joint, svd_split):
        factors = method(key, value, 6, statistics(20))
        errors[method] = squared_error(
            torch.cat((key, value)), factors.down, torch.cat((factors.up_key, factors.up_value))
        )
    assert errors[svd_joint] < errors[svd_split]


def test_split_halves_the_rank_and_gives_the_rest_away():
    key, value = normal(2, 20), normal(8, 20, seed=1)
    factors = svd_split(key, value, 8, statistics(20))
    torch.testing.assert_close(factors.up_key @ factors.down, key)
    assert int((factors.up_value != 0).any(0).sum()) == 6
    factors = svd_split(value, key, 8, statistics(20))
    assert int((factors.up_key != 0).any(0).sum()) == 6
