"""Specs: published cache sizes, names, strict keys and the texts of their errors."""

import json
import re

import pytest

from kvfold.attention import GroupedSpec, LatentSpec, TiedSpec, spec_from_dict
from kvfold.errors import OptionError, UnknownNameError


def grouped(heads=8, **changes):
    return GroupedSpec(
        **({"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32} | changes), num_key_value_heads=heads
    )


def tied(heads=4, **changes):
    return TiedSpec(
        **({"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32} | changes), num_key_value_heads=heads
    )


def latent(**changes):
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    ranks = {"kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    return LatentSpec(**(shape | ranks | changes))


# METHODS: elements per token and layer at tensor-parallel degrees 1, 2, 4, 8, 16.
CACHED = {
    "MHA": (grouped(8), [2 * 8 * 32, 2 * 4 * 32, 2 * 2 * 32, 2 * 32, 2 * 32]),
    "GQA": (grouped(2), [2 * 2 * 32, 2 * 32, 2 * 32, 2 * 32, 2 * 32]),
    "MQA": (grouped(1), [2 * 32] * 5),
    "GTA-4": (tied(4), [4 * 32 + 16, 2 * 32 + 16, 32 + 16, 32 + 16, 32 + 16]),
    "MLA": (latent(), [128 + 16] * 5),
    "GLA-2": (latent(latent_heads=2), [128 + 16, 64 + 16, 64 + 16, 64 + 16, 64 + 16]),
    "per_head": (latent(rotary_heads=8), [128 + 8 * 16, 128 + 4 * 16, 128 + 2 * 16, 128 + 16, 128 + 16]),
}


@pytest.mark.parametrize("name", CACHED)
def test_cached_elements_per_device(name):
    spec, expected = CACHED[name]
    assert [spec.cached_elements_per_device(degree) for degree in (1, 2, 4, 8, 16)] == expected
    assert spec.cached_elements() == expected[0]
    if name != "per_head":
        assert spec.name == name


def test_layouts():
    assert latent().layout == "shared"
    assert latent(rotary_heads=8).layout == "per_head"
    assert latent(rotary_heads=8).name == "MLA"


def test_softmax_scale_is_that_of_a_whole_head():
    assert latent().softmax_scale == 48**-0.5
    assert grouped().softmax_scale == 32**-0.5


@pytest.mark.parametrize("spec", [grouped(2), tied(), latent(q_lora_rank=64, norm_eps=1e-5)], ids=lambda s: s.kind)
def test_json_round_trip(spec):
    values = json.loads(json.dumps(spec.to_dict()))
    assert values["kind"] == spec.kind
    assert spec_from_dict(values) == spec
    with pytest.raises(AttributeError):
        spec.hidden_size = 1


WRONG_SHAPES = {
    "zero": (lambda: grouped(0), "grouped attention: num_key_value_heads must be an integer of at least 1, got 0."),
    "text": (lambda: grouped(8, head_dim="32"), "head_dim must be an integer of at least 1, got '32'."),
    "heads": (lambda: grouped(3), "grouped attention: num_key_value_heads=3 must divide num_attention_heads=8."),
    "odd head": (lambda: grouped(8, head_dim=31), "head_dim must be even for rotary pairs, got 31."),
    "tied head": (lambda: tied(4, head_dim=30), "tied attention: head_dim must be a multiple of 4, got 30."),
    "odd rope": (lambda: latent(qk_rope_head_dim=15), "latent attention: qk_rope_head_dim must be even, got 15."),
    "no rope": (lambda: latent(qk_rope_head_dim=0), "qk_rope_head_dim must be an integer of at least 2, got 0."),
    "rotary heads": (
        lambda: latent(rotary_heads=2),
        "rotary_heads must be 1 (shared) or num_key_value_heads=8 (per_head), got 2.",
    ),
    "latent heads": (lambda: latent(latent_heads=3), "latent_heads=3 must divide kv_lora_rank=128."),
    "latent groups": (lambda: latent(latent_heads=16), "latent_heads=16 must divide num_key_value_heads=8."),
    "query rank": (lambda: latent(q_lora_rank=63, q_latent_heads=2), "q_latent_heads=2 must divide q_lora_rank=63."),
    "query groups": (
        lambda: latent(q_lora_rank=48, q_latent_heads=3),
        "q_latent_heads=3 must divide num_attention_heads=8.",
    ),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_shapes_that_contradict_each_other(name, one_line):
    build, message = WRONG_SHAPES[name]
    with pytest.raises(OptionError, match=re.escape(message)) as error:
        build()
    one_line(error)


WRONG_KEYS = {
    "no kind": ({"kind": None}, OptionError, "needs a 'kind', one of grouped, tied, latent; got None."),
    "unknown kind": ({"kind": "latnet"}, UnknownNameError, "unknown attention kind 'latnet'. Did you mean 'latent'?"),
    "unknown key": (
        {"kv_lora_rnk": 3},
        UnknownNameError,
        "unknown field of latent attention 'kv_lora_rnk'. Did you mean 'kv_lora_rank'?",
    ),
}


@pytest.mark.parametrize("name", WRONG_KEYS)
def test_strict_keys(name, one_line):
    change, kind, message = WRONG_KEYS[name]
    with pytest.raises(kind, match=re.escape(message)) as error:
        spec_from_dict(latent().to_dict() | change)
    one_line(error)


def test_missing_key(one_line):
    values = latent().to_dict()
    del values["v_head_dim"]
    with pytest.raises(OptionError, match="latent attention spec is incomplete: .*'v_head_dim'") as error:
        spec_from_dict(values)
    one_line(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("latent_norm", "no"),
        ("q_lora_rank", 1.5),
        ("q_lora_rank", 0),
        ("hidden_size", "256"),
        ("norm_eps", "small"),
        ("kv_lora_rank", True),
    ],
)
def test_wrong_types(key, value, one_line):
    with pytest.raises(OptionError, match=key) as error:
        spec_from_dict(latent().to_dict() | {key: value})
    one_line(error)
