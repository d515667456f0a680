"""Refit and polish of one layer: they only ever come closer, and repeat themselves to the bit."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from kvfold.attention import GroupedSpec, LatentSpec, LayerContext, build_attention
from kvfold.convert.calibration import AttentionSample
from kvfold.convert.polish import polish, steps_within
from kvfold.convert.refit import DAMPING, refit_output

BIASES = dict.fromkeys(("query_bias", "value_bias", "output_bias"), True)


def build(spec, seed, randomise):
    config = LlamaConfig(attn_implementation="sdpa")
    attention = build_attention(spec, LayerContext(config=config, layer_idx=0, base_pairs=4))
    return randomise(attention, seed).requires_grad_(False)


@pytest.fixture
def converted(randomise):
    spec = LatentSpec(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        kv_lora_rank=12,
        rotary_heads=1,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        rope_key_bias=True,
        **BIASES,
    )
    return build(spec, 1, randomise)


@pytest.fixture
def data(randomise):
    """Six windows of 40 tokens, and the answers of a layer of the original's kind."""
    spec = GroupedSpec(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, key_bias=True, **BIASES
    )
    original = build(spec, 0, randomise)
    inputs = torch.randn(6, 40, 32, generator=torch.Generator().manual_seed(2))
    angle = torch.arange(40)[:, None] * 0.5 ** torch.arange(4).repeat(2)
    rotation = (angle.cos()[None], angle.sin()[None])
    return AttentionSample(
        inputs=inputs,
        target=original(inputs, rotation, None)[0],
        position_embeddings=rotation,
        attention_mask=None,
    )


def squared_error(attention, data):
    with torch.no_grad():
        output, _ = attention(data.inputs, data.position_embeddings, data.attention_mask)
    return float((output - data.target).double().square().sum() / data.target.double().square().sum())


def bytes_of(attention):
    return {name: tensor.numpy().tobytes() for name, tensor in attention.state_dict().items()}


def test_a_refit_is_the_damped_least_squares_solution(converted, data):
    seen = []
    handle = converted.o_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].double().flatten(0, 1))
    )
    before, start = squared_error(converted, data), converted.o_proj.weight.clone()
    handle.remove()
    refit_output(converted, data)
    assert squared_error(converted, data) < 0.8 * before
    # At the optimum the error that the weights could still remove is the pull of the damping.
    (heads,) = seen
    with torch.no_grad():
        rest = (data.target - converted(data.inputs, data.position_embeddings, None)[0]).double().flatten(0, 1)
    pull = DAMPING * heads.square().sum(0).mean() * (converted.o_proj.weight - start).double()
    torch.testing.assert_close(rest.T @ heads, pull, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("inputs", ["random", "constant", "few"])
def test_a_refit_never_makes_it_worse(converted, data, inputs):
    if inputs == "constant":
        data = replace(data, inputs=data.inputs[:1, :1].expand(6, 40, 32).contiguous())
    if inputs == "few":
        data = replace(
            data,
            inputs=data.inputs[:1, :5],
            target=data.target[:1, :5],
            position_embeddings=tuple(table[:, :5] for table in data.position_embeddings),
        )
    before = squared_error(converted, data)
    for _ in range(3):
        refit_output(converted, data)
        after = squared_error(converted, data)
        assert after <= before * (1 + 1e-6)
        before = after
    assert all(tensor.isfinite().all() for tensor in converted.state_dict().values())


def test_a_refit_of_a_perfect_layer_changes_nothing(converted, data):
    with torch.no_grad():
        answer, _ = converted(data.inputs, data.position_embeddings, None)
    before = converted.o_proj.weight.clone()
    refit_output(converted, replace(data, target=answer))
    torch.testing.assert_close(converted.o_proj.weight, before, rtol=0, atol=1e-6)


def test_a_polish_comes_closer_and_its_seed_decides(converted, data, monkeypatch):
    monkeypatch.setattr(sys.modules[AttentionSample.__module__], "BATCH_TOKENS", 80)  # two windows a step
    before = squared_error(converted, data)
    results = []
    for seed in (3, 3, 4):
        fitted = copy.deepcopy(converted)
        polish(fitted, data, steps=60, seed=seed)
        assert squared_error(fitted, data) < 0.7 * before
        assert not any(parameter.requires_grad or parameter.grad is not None for parameter in fitted.parameters())
        results.append(bytes_of(fitted))
    assert results[0] == results[1] != results[2]
    assert results[0]["rotary_index"] == bytes_of(converted)["rotary_index"]
    torch.manual_seed(99)  # no global state has a part in it
    again = copy.deepcopy(converted)
    polish(again, data, steps=60, seed=3)
    assert bytes_of(again) == results[0]


def test_a_pruned_layer_stays_finite(converted, data):
    """All weights zero, and nothing to answer."""
    for parameter in converted.parameters():
        parameter.zero_()
    nothing = replace(data, target=torch.zeros_like(data.target))
    refit_output(converted, nothing)
    polish(converted, nothing, steps=3, seed=0)
    assert all(tensor.isfinite().all() for tensor in converted.state_dict().values())
    assert nothing.relative_error(converted) == 0


def test_steps_follow_from_the_time(converted, data):
    few = steps_within(0.0, copy.deepcopy(converted), data)
    many = steps_within(5.0, copy.deepcopy(converted), data)
    assert few == 1 < many
