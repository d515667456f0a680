"""Published models, built on the meta device from the shipped recipes, and shapes that cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.errors import KvfoldError
from kvfold.lab import Architecture, match, read_matches, read_sweep
from kvfold.lab.matching import solved

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes" / "lab").glob("*.yaml"))
PUBLISHED = json.loads((ROOT / "tests" / "attention" / "data" / "published_parameters.json").read_text("utf-8"))
MATCHED, DOUBLE = PUBLISHED["matched"], PUBLISHED["double_heads"]
NAMES = {"mha": "MHA", "gqa4": "GQA-4", "mqa": "MQA", "gta4": "GTA-4", "mla": "MLA", "gla2": "GLA-2", "glaq2": "GLAq-2"}
FILES = {"S": "matched_183m", "M": "matched_434m", "L": "matched_877m", "XL": "matched_1471m"}
XL_BYTES = {
    "MHA": (8192, 4096, 2048),
    "GQA-4": (2048, 1024, 512),
    "GTA-4": (1152, 640, 384),
    "GLA-2": (1152, 640, 640),
    "MLA": (1152, 1152, 1152),
}
"""Cached bytes of one token, layer and device at tensor-parallel degrees 1, 2 and 4 (arXiv 2505.21487)."""
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}


def variants(name: str) -> dict[str, Architecture]:
    return {found.name: found.architecture for found in read_matches(ROOT / "recipes" / "lab" / f"{name}.yaml")}


@pytest.mark.parametrize("size", FILES)
def test_published_models_have_their_published_sizes(size):
    rows = {NAMES[row["variant"]]: row for row in MATCHED["rows"] if row["size"] == size}
    built = variants(FILES[size])
    assert built.keys() == rows.keys()
    for name, shape in built.items():
        assert shape.parameters() == shape.on_meta().num_parameters()
        assert round(shape.parameters() / 1e6, 2) == rows[name]["params_millions"]


@pytest.mark.parametrize("size", FILES)
def test_the_solver_finds_the_published_widths(size):
    """Published widths are multiples of 8, 16 or 2 without a rule: to within one step of 8."""
    built = variants(FILES[size])
    for name, shape in built.items():
        found = solved(replace(shape, intermediate_size=8), built["MHA"].parameters(), "intermediate_size", 8)
        assert abs(found.intermediate_size - shape.intermediate_size) <= 8, name


def test_the_double_heads_models_have_their_published_sizes_and_widths():
    low, high = DOUBLE["params_millions_range"]
    built = variants("double_heads_2873m")
    for name, shape in built.items():
        assert shape.parameters() == shape.on_meta().num_parameters()
        assert low <= round(shape.parameters() / 1e6, 1) <= high
        found = solved(replace(shape, intermediate_size=8), built["GQA"].parameters(), "intermediate_size", 8)
        assert abs(found.intermediate_size - shape.intermediate_size) <= 8, name


def test_cached_bytes_of_the_published_xl_models():
    for name, shape in variants("matched_1471m").items():
        elements = [shape.spec().cached_elements_per_device(degree) for degree in (1, 2, 4)]
        assert tuple(2 * count for count in elements) == XL_BYTES[name]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_a_sweep_of_equal_sizes(path):
    sweep = read_sweep(path)
    sizes = [found.architecture.on_meta().num_parameters() for found in sweep.matches]
    assert max(sizes) / min(sizes) < 1.005
    assert len({cell.name for cell in sweep.cells()}) == len(sweep.recipes) * len(sweep.seeds)
    assert all(sweep.label(name) for name in sweep.recipes)


def test_flops_are_those_of_the_matrix_products():
    shape = Architecture(attention="mha", head_dim=8, **TINY)
    weights = shape.parameters() - 64 * 32 - (2 * 2 + 1) * 32  # embeddings are looked up; norms are no products
    attention = 2 * 2 * 2 * 4 * 8 * 100 // 2  # layers, FLOPs, scores and sums, heads, dims, tokens; half are causal
    assert shape.flops_per_token(100) == 2 * (weights + 64 * 32) + attention


@pytest.mark.parametrize(
    ("solve", "expected"), [("num_attention_heads", 4), ("num_hidden_layers", 2), ("intermediate_size", 48)]
)
def test_what_was_changed_is_found_again(solve, expected):
    shape = Architecture(attention="gqa", num_key_value_heads=2, head_dim=8, **TINY)
    other = replace(shape, **{solve: 2 * expected})
    (found,) = match(shape, {"other": other}, solve=solve)
    assert getattr(found.architecture, solve) == expected and found.error == 0


MISTAKES = {
    "kind": ({"attention": "gla2"}, "unknown attention 'gla2'. Did you mean 'gla'?"),
    "foreign": ({"attention": "mha", "kv_lora_rank": 8}, "mha attention has no kv_lora_rank, got 8: leave it out."),
    "groups": ({"attention": "gqa"}, "gqa attention needs num_key_value_heads: give it."),
    "query": ({"attention": "glaq"}, "glaq attention needs q_lora_rank: give it."),
    "divide": ({"attention": "gqa", "num_key_value_heads": 3}, "num_key_value_heads=3 must divide"),
    "latents": ({"attention": "gla", "latent_heads": 3}, "latent_heads=3 must divide"),
    "branches": ({"attention": "mlra", "branches": 3}, "branches=3 must divide latent_heads=4"),
    "number": ({"attention": "mha", "hidden_size": 0}, "hidden_size must be 1 or more, got 0."),
    "text": ({"attention": "mha", "num_hidden_layers": "2"}, "num_hidden_layers must be a whole number, got '2'."),
    "missing": ({"attention": "mha", "hidden_size": None}, "hidden_size must be a whole number"),
    "rate": ({"attention": "mha", "init_std": "2e-2"}, "init_std must be a number, got '2e-2': write it with a point"),
    "unknown": ({"attention": "mha", "hiden_size": 3}, "Did you mean 'hidden_size'?"),
    "rotary": ({"attention": "mla", "qk_rope_head_dim": 6}, "qk_rope_head_dim 6 must divide head_dim 8"),
    "odd": ({"attention": "mha", "head_dim": 7}, "head_dim must be even for rotary pairs, got 7."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_shapes_that_cannot_be(name, one_line):
    changes, expected = MISTAKES[name]
    with pytest.raises(KvfoldError) as error:
        Architecture.from_dict(TINY | {"head_dim": 8} | changes)
    assert expected in one_line(error)


def test_a_model_that_lacks_a_number(one_line):
    with pytest.raises(KvfoldError) as error:
        Architecture.from_dict({"attention": "mha", "hidden_size": 32})
    assert "the model lacks num_hidden_layers, num_attention_heads" in one_line(error)


def test_what_cannot_be_matched_says_how_far_off_it_is(one_line):
    shape = Architecture(attention="mha", head_dim=8, **TINY)
    wide = Architecture(attention="mha", head_dim=8, **TINY | {"num_attention_heads": 32})
    with pytest.raises(KvfoldError) as error:
        match(shape, {"wide": wide})
    assert "wide cannot be matched by intermediate_size: the nearest, 8, is +" in one_line(error)
