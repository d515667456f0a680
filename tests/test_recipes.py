"""Every recipe is read by its command's own parser, and planned on shapes alone."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvfold.cli import convert, heal
from kvfold.cli.command import given_options
from kvfold.cli.main import parse
from kvfold.convert import ConvertOptions
from kvfold.convert.plan import make_plan
from kvfold.families import family_of
from kvfold.train import HealOptions

RECIPES = Path(__file__).parent.parent / "recipes"
SHAPES = {
    "smollm-135m": (576, 30, 9, 3, 1536, 49152, 2048),
    "smollm-360m": (960, 32, 15, 5, 2560, 49152, 2048),
    "smollm-1.7b": (2048, 24, 32, 32, 8192, 49152, 2048),
    "llama-2-7b": (4096, 32, 32, 32, 11008, 32000, 4096),
}
"""Width, layers, query and KV heads, width of the MLP, vocabulary, positions of the models of the paper's figures."""
PARAMETERS = {"smollm-135m": 135e6, "smollm-360m": 362e6, "smollm-1.7b": 1711e6, "llama-2-7b": 6738e6}


def config_of(model: str) -> LlamaConfig:
    width, layers, heads, kv_heads, mlp, vocabulary, positions = SHAPES[model]
    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=model != "llama-2-7b",
    )


def options_of(command, recipe: Path, options: type):
    names = {field.name for field in fields(options)}
    parsed = parse(command, ["MODEL", "OUT", "--config", str(recipe)])
    return options.from_dict(given_options(parsed, [name for name in vars(parsed) if name in names]))


@pytest.mark.parametrize("model", SHAPES)
def test_the_shapes_are_those_of_the_models(model):
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config_of(model))
    assert network.num_parameters() == pytest.approx(PARAMETERS[model], rel=0.01)


@pytest.mark.parametrize("model", SHAPES)
def test_published_runs_are_planned(model):
    """Prints tokens, steps and cache bytes of each; -s shows them."""
    config = config_of(model)
    dim = config.hidden_size // config.num_attention_heads
    healing = options_of(heal.COMMAND, RECIPES / "mha2mla" / "heal" / f"{model}.yaml", HealOptions)
    assert (healing.warmup_steps, healing.decay_steps, healing.steps) == (1200, 2000, 12000)
    assert healing.sequence_length == config.max_position_embeddings and sum(healing.data_weights) == pytest.approx(1)
    tokens = healing.steps * healing.step_tokens
    print(f"\n{model}: {healing.steps:,} steps, {tokens:,} tokens")
    recipes = sorted((RECIPES / "mha2mla" / "convert" / f"head-dim-{dim}").glob("*.yaml"))
    assert len(recipes) == 10
    for recipe in recipes:
        options = options_of(convert.COMMAND, recipe, ConvertOptions)
        plan = make_plan(model, config, family_of(config), torch.bfloat16, options)
        target = plan.layers[0].target
        assert target.qk_rope_head_dim == dim // 8 and target.rotary_heads == config.num_key_value_heads
        print(f"  {recipe.stem}: {2 * plan.elements_after:,} bytes per token, {plan.kept:.2%}")
        if found := re.fullmatch(r"2-norm-(joint|split)-(\d+)", recipe.stem):
            assert plan.kept == pytest.approx((dim / 8 + int(found[2])) / (2 * dim))
            assert options.factorize == f"svd_{found[1]}" and f"{100 * plan.kept:g} %" in recipe.read_text()
        else:
            assert plan.kept == 1.0 and target.kv_lora_rank == config.num_key_value_heads * (2 * dim - dim // 8)


def test_every_recipe_is_tested():
    known = {"mha2mla", "deepspeed", "figures"}
    assert {path.name for path in RECIPES.iterdir() if path.is_dir()} <= known
