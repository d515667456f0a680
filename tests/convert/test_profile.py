"""Sharing ranks among layers, and the prediction behind it."""

import itertools

import pytest
import torch

from kvfold.convert.profile import LEAST_RANK, RANK_STEP, LayerProfile, Profile, share_ranks


def profile(divergence, decay, rotary_share=0.25):
    rest = decay ** torch.arange(41, dtype=torch.float64)
    return LayerProfile(
        rope_dim=8,
        rank=16,
        divergence=divergence,
        rotary_share=rotary_share,
        rotary_rest=rest,
        rank_rest=rest,
    )


def test_what_was_tried_is_predicted_as_it_was_measured():
    layers = (profile(0.5, 0.8), profile(0.1, 0.9))
    whole = Profile(layers=layers, original=3.0, compounding=2.0)
    assert layers[0].predict(8, 16) == pytest.approx(0.5)
    assert whole.predict(8, [16, 16]) == pytest.approx(2 * 0.6)
    assert whole.predict(8, [20, 20]) < whole.predict(8, [16, 16]) < whole.predict(8, [12, 16])
    assert whole.predict(16, [16, 16]) < whole.predict(8, [16, 16])


def test_the_greedy_share_is_the_best_one():
    layers = [profile(0.5, 0.8), profile(0.1, 0.9), profile(0.3, 0.7)]
    ranks = share_ranks(layers, 8, 16)
    assert sum(ranks) == 48
    assert ranks[0] >= ranks[2]

    def cost(choice):
        return sum(layer.predict(8, rank) for layer, rank in zip(layers, choice, strict=True))

    steps = range(LEAST_RANK, 41, RANK_STEP)
    best = min((c for c in itertools.product(steps, repeat=3) if sum(c) == 48), key=cost)
    assert cost(ranks) == pytest.approx(cost(best))


def test_a_layer_without_damage_gets_the_least():
    assert share_ranks([profile(0.5, 0.9), profile(0.0, 0.9)], 8, 12)[1] == LEAST_RANK


def test_budgets_below_the_least_rank_stay_even():
    assert share_ranks([profile(0.5, 0.9), profile(0.1, 0.9)], 8, 2) == [2, 2]
