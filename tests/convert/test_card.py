"""What is written beside the weights can be read back."""

from dataclasses import replace

import yaml

from kvfold.convert import ConvertOptions
from kvfold.convert.card import _recipe


def test_the_recipe_is_yaml_whatever_the_files_are_called():
    options = ConvertOptions(cache_ratio=0.25, calibration=('it\'s "odd": {x}\\ü.txt', "- b #.txt"), dtype="float16")
    spelt_out = replace(options, rope="mixed", factorize="attention_aware", calibration_weights=(1.0, 1.0))
    assert ConvertOptions.from_dict(yaml.safe_load(_recipe(options))) == spelt_out
    assert ConvertOptions.from_dict(yaml.safe_load(_recipe(ConvertOptions(lossless=True)))).lossless


def test_the_recipe_spells_the_calibration_out():
    recipe = yaml.safe_load(_recipe(ConvertOptions(cache_ratio=0.25)))
    assert (recipe["calibration"], recipe["seed"]) == (["default"], 0)
    assert "calibration_weights" not in recipe  # of a single text, where a flag may name others
    texts = ("default", "sampled", "a.txt")
    weighted = ConvertOptions(cache_ratio=0.25, calibration=texts, calibration_weights=(1.0, 0.5, 1e-7), seed=7)
    recipe = yaml.safe_load(_recipe(weighted))
    assert ConvertOptions.from_dict(recipe) == replace(weighted, rope="mixed", factorize="attention_aware")
    recipe = yaml.safe_load(_recipe(replace(weighted, calibration_weights=())))
    assert recipe["calibration_weights"] == [1.0, 1.0, 1.0]
