"""Sharing ranks among layers, and the prediction behind it."""

import itertools

import pytest
import torch

from kvfold.checkpoint import open_checkpoint
from kvfold.convert import ConvertOptions, calibration_ids, convert, prepare, profile_checkpoint
from kvfold.convert.profile import LEAST_RANK, RANK_STEP, LayerProfile, Profile, _rotary_rest, share_ranks
from kvfold.convert.rotary_constants import best_constants
from kvfold.convert.rotary_mixing import TRIALS, greedy, spectrum_of


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


def test_a_layer_is_profiled_as_a_conversion_measures_it(save_model, text, tmp_path):
    options = {"cache_ratio": 0.25, "calibration": [text], "calibration_tokens": 128, "calibration_window": 32}
    checkpoint, chosen = open_checkpoint(save_model()), ConvertOptions.from_dict(options)
    family, plan = prepare(checkpoint, chosen)
    tokenizer = checkpoint.load_tokenizer()
    ids = calibration_ids(checkpoint.path, tokenizer, chosen, lambda *step: None)
    found = profile_checkpoint(checkpoint, family, tokenizer, ids, plan, chosen, lambda *step: None)
    done = convert(checkpoint.path, tmp_path / "out", one_shot=True, **options)
    assert found.original == done.stage_losses["original"]
    for index, layer in enumerate(found.layers):
        target = plan.layers[index].target
        assert (layer.rope_dim, layer.rank) == (target.qk_rope_head_dim, target.kv_lora_rank)
        rotary, low_rank = (done.stage_errors[stage][index] for stage in ("rotary", "low rank"))
        assert layer.rotary_share == pytest.approx(min(rotary / low_rank, 1))
        for rest in (layer.rotary_rest, layer.rank_rest):
            assert (float(rest[0]), float(rest[-1])) == pytest.approx((1, 0), abs=1e-6)
            assert bool((rest.diff() <= 0).all())
        assert bool((layer.rank_rest.diff(n=2) >= -1e-9).all())  # every rank is worth less than the one before


def test_what_rotary_components_leave_is_that_of_the_best_reach(make_layer, observe, hidden):
    weights = make_layer()
    statistics = observe(weights, hidden)
    spectrum = spectrum_of(weights, statistics, best_constants(weights, statistics))
    rest = _rotary_rest(spectrum)
    for pairs in range(1, 9):
        taken = [float(greedy(spectrum, pairs, range(4), **choices)[1].double().sum()) for choices in TRIALS]
        assert float(rest[pairs]) == pytest.approx(max(1 - max(taken) / spectrum.energy(), 0), abs=1e-6)
