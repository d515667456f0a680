"""What replaces a dropped rotation is the least-squares optimum, and exact where there is nothing to rotate."""

from dataclasses import replace

import pytest
import torch

from kvfold.convert.attention_moments import ROW_STEP
from kvfold.convert.rotary_constants import DAMPING, best_constants, fold_constants, identity


def scores_by_row(weights, hidden_WTD, cos, sin, head, pair):
    """Per row the root of its attention weights, the features q (x) k and the rotated scores, centred under them."""
    P = weights.spec.head_dim // 2
    group = head // weights.spec.query_groups
    features, targets = [], []
    for window, x in enumerate(hidden_WTD.double()):
        q, k = (
            torch.einsum("td,hcd->thc", x, w) + b
            for w, b in ((weights.query, weights.query_bias), (weights.key, weights.key_bias))
        )
        gain = torch.complex(cos, sin)[:, :P]
        turned_q, turned_k = (torch.complex(y[..., :P], y[..., P:]) * gain[:, None] for y in (q, k))
        scores = torch.einsum("ihp,jhp->hijp", turned_q, turned_k[:, [n // 2 for n in range(4)]].conj()).real
        total = (scores.sum(-1) * weights.spec.head_dim**-0.5).masked_fill(
            ~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -torch.inf
        )
        bare_q, bare_k = (y.unflatten(-1, (2, P))[..., pair] for y in (q, k))
        for i in range(window % ROW_STEP, len(x), ROW_STEP):
            a = total[head, i].softmax(0)
            f = torch.einsum("a,jb->jab", bare_q[i, head], bare_k[:, group]).flatten(1)
            s = scores[head, i, :, pair]
            features.append(a.sqrt()[:, None] * (f - a @ f))
            targets.append(a.sqrt() * (s - a @ s))
    return torch.cat(features), torch.cat(targets)


@pytest.mark.parametrize("gain", [1.0, 1.3])
def test_constants_are_the_least_squares_solution(make_layer, observe, tables, hidden, gain):
    weights = make_layer(rope_gain=gain)
    constants = best_constants(weights, observe(weights, hidden))
    tables_of = tables(weights, hidden.shape[1])
    kept = identity(weights)
    for head, pair in ((0, 0), (1, 3), (2, 1), (3, 2)):
        features, target = scores_by_row(weights, hidden, *tables_of, head, pair)
        # The damping is that of further rows, which ask for zero.
        ridge = (DAMPING * features.square().sum(0).mean()).sqrt() * torch.eye(4).double()
        damped, padded = torch.cat((features, ridge)), torch.cat((target, target.new_zeros(4)))
        optimum = torch.linalg.lstsq(damped, padded[:, None]).solution[:, 0]
        torch.testing.assert_close(constants.matrix[head, pair].flatten(), optimum, rtol=1e-3, atol=1e-4)

        def error(matrix, features=features, target=target):
            return float((features @ matrix.flatten() - target).square().sum() / target.square().sum())

        assert error(constants.matrix[head, pair]) < error(kept.matrix[head, pair])
        assert float(constants.residual[head, pair]) == pytest.approx(error(constants.matrix[head, pair]), rel=1e-3)
        best = torch.linalg.lstsq(features, target[:, None]).solution
        assert error(constants.matrix[head, pair]) == pytest.approx(error(best), rel=0.02)


@pytest.mark.parametrize("gain", [1.0, 1.3])
def test_a_pair_that_does_not_turn_keeps_its_scores(make_layer, observe, hidden, gain):
    """At frequency zero the best constant is the gain of the rope scaling, up to the damping, and nothing is missed."""
    weights = make_layer(rope_gain=gain)
    still = replace(weights, frequency=torch.zeros_like(weights.frequency))
    constants = best_constants(still, observe(still, hidden))
    torch.testing.assert_close(constants.matrix, identity(still).matrix, rtol=0, atol=0.1)
    assert float(constants.residual.max()) < 1e-4


def test_without_text_nothing_is_put_in_place(make_layer, observe, hidden):
    weights = make_layer(rope_gain=1.3)
    constants = best_constants(weights, replace(observe(weights, hidden), attention=None))
    assert torch.equal(constants.matrix, identity(weights).matrix)
    query, bias = fold_constants(weights, constants)
    torch.testing.assert_close(query, 1.3 * weights.query)
    torch.testing.assert_close(bias, 1.3 * weights.query_bias)


def test_a_fold_is_the_same_score(make_layer, observe, hidden):
    weights = make_layer()
    constants = best_constants(weights, observe(weights, hidden))
    query, bias = fold_constants(weights, constants)
    x, k = hidden[0, 0].double(), torch.randn(8, generator=torch.Generator().manual_seed(4)).double()
    for head in range(4):
        bare = (weights.query[head] @ x + weights.query_bias[head]).unflatten(0, (2, -1))
        expected = torch.einsum("ap,pab,bp->", bare, constants.matrix[head], k.unflatten(0, (2, -1)))
        torch.testing.assert_close((query[head] @ x + bias[head]) @ k, expected)
