"""Every recipe is read by its command's own parser, and planned on shapes alone."""

import os
import re
import shlex
import subprocess
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from kvfold.cli import convert, heal
from kvfold.cli.command import given_options
from kvfold.cli.main import COMMANDS, parse
from kvfold.convert import ConvertOptions
from kvfold.convert.plan import make_plan
from kvfold.families import family_of
from kvfold.train import TrainOptions

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
MHA2MLA = RECIPES / "mha2mla"
SHAPES = {
    "smollm-135m": (576, 30, 9, 3, 1536, 49152, 2048),
    "smollm-360m": (960, 32, 15, 5, 2560, 49152, 2048),
    "smollm-1.7b": (2048, 24, 32, 32, 8192, 49152, 2048),
    "llama-2-7b": (4096, 32, 32, 32, 11008, 32000, 4096),
}
"""Width, layers, query and KV heads, width of the MLP, vocabulary, positions of the models of the paper's figures."""
MIXTURE = {
    "HuggingFaceTB/smollm-corpus:fineweb-edu-dedup": (0.70, "text"),
    "HuggingFaceTB/smollm-corpus:cosmopedia-v2": (0.15, "text"),
    "HuggingFaceTB/smollm-corpus:python-edu": (0.08, "text"),
    "open-web-math/open-web-math": (0.06, "text"),
    "bigcode/stackoverflow-clean": (0.01, "content"),
}
"""Weight and column of the text of each data set."""
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
    healing = options_of(heal.COMMAND, MHA2MLA / "heal" / f"{model}.yaml", TrainOptions)
    tokens = healing.steps * healing.step_tokens
    print(f"\n{model}: {healing.steps:,} steps, {tokens:,} tokens")
    assert tokens == 12_000 * 256 * SHAPES[model][-1]
    for path in conversions(dim):
        options = options_of(convert.COMMAND, path, ConvertOptions)
        plan = make_plan(model, config, family_of(config), torch.bfloat16, options)
        target = plan.layers[0].target
        print(f"  {path.stem}: {2 * plan.elements_after:,} bytes per token, {plan.kept:.2%}")
        assert (target.qk_rope_head_dim, target.rotary_heads) == (dim // 8, SHAPES[model][3])
        if found := re.fullmatch(r"2-norm-(joint|split)-(\d+)", path.stem):
            assert plan.kept == (dim / 8 + int(found[2])) / (2 * dim)
            assert plan.factorize == f"svd_{found[1]}" and f"{100 * plan.kept:g} %" in path.read_text()
        else:  # the rank of all unrotated keys and values, at which the factorisation is exact
            assert plan.kept == 1 and target.kv_lora_rank == SHAPES[model][3] * (2 * dim - dim // 8)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_conversions_are_those_of_the_figures(dim):
    ranks = [dim // 8, dim // 4, dim // 2]
    low_rank = {f"2-norm-{how}-{rank}" for how in ("joint", "split") for rank in ranks}
    assert {path.stem for path in conversions(dim)} == {"high", "low", "uniform", "2-norm"} | low_rank
    for path in conversions(dim):
        options = options_of(convert.COMMAND, path, ConvertOptions)
        assert options.layout == "per_head" and options.one_shot and path.read_text().startswith("# ")
        assert path.stem.startswith(options.rope_strategy)
        assert bool(options.calibration_tokens) == (options.rope == "2-norm")


@pytest.mark.parametrize("model", SHAPES)
def test_the_fine_tuning_is_the_published_one(model):
    options = options_of(heal.COMMAND, MHA2MLA / "heal" / f"{model}.yaml", TrainOptions)
    assert dict(zip(options.data, zip(options.data_weights, options.columns, strict=True), strict=True)) == MIXTURE
    assert sum(options.data_weights) == pytest.approx(1)
    assert (options.warmup_steps, options.decay_steps, options.steps) == (1200, 2000, 12000)
    assert (options.learning_rate, options.weight_decay, options.clip, options.seed) == (1e-4, 0, 1, 42)
    assert (options.trains, options.precision, options.teacher) == ("all", "bfloat16", None)
    # A pass holds few sequences on one GPU, and has some for each of eight.
    assert options.batch // options.accumulate == 8 and options.batch % options.accumulate == 0


@pytest.mark.parametrize("model", SHAPES)
def test_the_script_runs_what_the_commands_understand(model):
    names = script(model, "runs of it")
    assert Counter(name for name, _ in names) == {"heal": 11, "convert": 10, "plot": 2}
    some = script(model, "folder", "high", "2-norm")
    assert Counter(name for name, _ in some) == {"heal": 3, "convert": 2, "plot": 1}
    assert [run.partition("=")[0] for run in some[-1][1].runs] == ["full-rope", "high", "2-norm"]


def test_the_script_skips_what_is_finished(tmp_path):
    for place in ("runs/full-rope/model", "starts/high"):
        (tmp_path / place).mkdir(parents=True)
    names = [name for name, _ in script("smollm-135m", str(tmp_path), "high")]
    assert names == ["heal", "plot"]


@pytest.mark.parametrize("argv", [["smollm-135m"], ["gpt-2", "folder"], ["smollm-135m", "folder", "2-norm-joint-64"]])
def test_the_script_refuses(argv):
    done = subprocess.run([ROOT / "runs" / "mha2mla.sh", *argv], capture_output=True, text=True, env=dry())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("path", sorted((RECIPES / "figures").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_figures_of_a_small_machine_have_options_that_exist(path):
    """What benchmarks/healing_curves.py passes on, beside the texts."""
    recipe = yaml.safe_load(path.read_text())
    for model in recipe["models"].values():
        for curve in model["curves"].values():
            if curve.get("convert"):
                ConvertOptions.from_dict(curve["convert"])
            TrainOptions.from_dict({"data": "default"} | recipe["heal"] | curve.get("heal", {}))
    for panels in recipe["figures"].values():
        for title, names in panels.items():
            assert set(names) <= set(recipe["models"][title]["curves"])


def test_every_recipe_is_tested():
    read = [path for dim in (64, 128) for path in conversions(dim)]
    read += [MHA2MLA / "heal" / f"{model}.yaml" for model in SHAPES]
    read += (RECIPES / "figures").glob("*.yaml")
    read += (RECIPES / "lab").glob("*.yaml")  # by tests/lab/test_architecture.py
    assert sorted(read) == sorted(path for path in RECIPES.rglob("*") if path.suffix in (".yaml", ".yml"))


def conversions(dim: int) -> list[Path]:
    return sorted((MHA2MLA / "convert" / f"head-dim-{dim}").glob("*.yaml"))


def dry() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("LAUNCH", "OPTIONS")} | {"DRY": "1"}


def script(*argv: str):
    """Name and parsed options of every kvfold command that runs/mha2mla.sh would start."""
    printed = subprocess.run(
        [ROOT / "runs" / "mha2mla.sh", *argv], capture_output=True, text=True, check=True, env=dry()
    ).stdout
    commands = [shlex.split(line.removeprefix("+ ")) for line in printed.splitlines()]
    assert {command[0] for command in commands} == {"mkdir", "kvfold"}
    return [(name, parse(COMMANDS[name], rest)) for program, name, *rest in commands if program == "kvfold"]
