"""`kvfold convert`: what its flags and recipes hand to the library."""

import dataclasses
import importlib
import re
from types import SimpleNamespace

import pytest

from kvfold.cli import main as cli
from kvfold.cli.convert import METHOD_OPTIONS


@pytest.fixture
def calls(monkeypatch):
    """The calls that reach `convert` and `plan`, which answer with nothing."""
    calls = []
    answer = SimpleNamespace(to_dict=dict)

    def convert(model, out, *, progress, **options):
        calls.append(("convert", model, out, options))
        return answer

    def plan(model, **options):
        calls.append(("plan", model, options))
        return answer

    # The module, not the function of the same name that the package re-exports.
    library = importlib.import_module("kvfold.convert")
    monkeypatch.setattr(library, "convert", convert, raising=False)
    monkeypatch.setattr(library, "plan", plan, raising=False)
    return calls


def converted(calls, *argv):
    """The options that `kvfold convert m o ARGV` passes on."""
    assert cli.main(["convert", "m", "o", "--json", *argv]) == 0
    ((_, model, out, options),) = calls
    assert (model, out) == ("m", "o")
    return options


def convert_help():
    return " ".join(cli.COMMANDS["convert"].parser().format_help().split())


def recipe(folder, text):
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_only_what_the_user_gave_is_passed_on(calls):
    assert converted(calls) == {"overwrite": False}


def test_every_flag_arrives_under_the_name_of_its_field(calls):
    flags = "--layout per_head --qk-rope-head-dim 8 --d-kv 32 --kv-lora-rank 96 --cache-ratio 0.5 --rope 2-norm"
    more = "--factorize svd_joint --calibration a.txt b.txt --calibration-tokens 4096 --dtype bfloat16"
    assert converted(
        calls,
        *flags.split(),
        *more.split(),
        *("--calibration-window", "256", "--lossless", "--overwrite"),
        *("--calibration-weights", "1", "0.5", "--seed", "3"),
    ) == {
        "layout": "per_head",
        "qk_rope_head_dim": 8,
        "d_kv": 32,
        "kv_lora_rank": 96,
        "cache_ratio": 0.5,
        "rope": "2-norm",
        "factorize": "svd_joint",
        "calibration": ("a.txt", "b.txt"),
        "calibration_weights": (1.0, 0.5),
        "calibration_tokens": 4096,
        "calibration_window": 256,
        "seed": 3,
        "dtype": "bfloat16",
        "lossless": True,
        "overwrite": True,
    }


def test_zero_is_a_value(calls):
    assert converted(calls, "--kv-lora-rank", "0", "--cache-ratio", "0") == {
        "kv_lora_rank": 0,
        "cache_ratio": 0.0,
        "overwrite": False,
    }


def test_a_dry_run_only_plans(calls):
    assert cli.main(["convert", "m", "o", "--json", "--dry-run", "--cache-ratio", "0.25"]) == 0
    assert calls == [("plan", "m", {"cache_ratio": 0.25})]


@pytest.mark.parametrize("flag_first", [True, False])
def test_flags_win_over_the_recipe_wherever_they_stand(calls, tmp_path, flag_first):
    config = ["--config", recipe(tmp_path, "cache_ratio: 0.25\nrope: high\ncalibration: [a.txt]\n")]
    flag = ["--cache-ratio", "0.5"]
    options = converted(calls, *(flag + config if flag_first else config + flag))
    assert options == {"cache_ratio": 0.5, "rope": "high", "calibration": ("a.txt",), "overwrite": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache_ratioo: 0.25", "the recipe has an unknown entry 'cache_ratioo'. Did you mean 'cache_ratio'?"),
        ("colour: red", "the recipe has an unknown entry 'colour'. Known: model, out, cache_ratio,"),
        ("cache_ratio: much", "--cache-ratio must be a number, not 'much'"),
        ("d_kv: 1.5", "--d-kv must be a whole number, not '1.5'"),
        ("rope: [high]", "--rope must be a text, not"),
        ("lossless: perhaps", "the recipe entry 'lossless' must be true or false, not 'perhaps'"),
        ("calibration: a.txt", "the recipe entry 'calibration' must be a list of texts, not 'a.txt'"),
        ("calibration: [1]", "the recipe entry 'calibration' must be a list of texts, not [1]"),
        ("calibration: [1.5]", "the recipe entry 'calibration' must be a list of texts, not [1.5]"),
        (
            "calibration_weights: 3",
            "a recipe entry that takes a list (calibration, calibration_weights) has a single value: write it in",
        ),
        ("calibration_weights: [1, a]", "--calibration-weights must be a number, not 'a'"),
        ("seed: 1.5", "--seed must be a whole number, not '1.5'"),
        ("- 1", "the recipe must hold entries of the form `name: value`"),
        ("", "the recipe must hold entries of the form `name: value`"),
        ("a: [", "the recipe is not valid YAML: "),
    ],
)
def test_a_wrong_recipe_gets_one_line(calls, tmp_path, mistake, text, message):
    assert mistake("convert", "m", "o", "--config", recipe(tmp_path, text)).startswith(message)
    assert calls == []


def test_flags_and_recipe_entries_are_the_fields_of_the_options():
    from kvfold.convert import ConvertOptions

    assert METHOD_OPTIONS == tuple(field.name for field in dataclasses.fields(ConvertOptions))


def test_the_help_names_every_choice():
    from kvfold.convert.factorize import FACTORIZATIONS
    from kvfold.convert.options import DTYPES
    from kvfold.convert.rotary import LAYOUTS

    for name in (
        *FACTORIZATIONS,
        *DTYPES,
        *LAYOUTS,
        *(name for table in LAYOUTS.values() for name in table.strategies),
    ):
        assert re.search(rf"\b{name}\b", convert_help()), name
    for layout in LAYOUTS.values():
        assert f"{layout.default} (the default)" in convert_help()


def test_the_help_states_the_defaults_in_force():
    from kvfold.convert import ConvertOptions

    text = convert_help()
    options = ConvertOptions(lossless=True)
    for value in (options.layout, options.calibration_tokens, options.calibration_window, options.seed):
        assert f"(default: {value})" in text
