"""What is written beside the weights can be read back."""

from dataclasses import replace

import yaml

from kvfold.convert import ConvertOptions
from kvfold.convert.card import _recipe


def test_the_recipe_is_yaml_whatever_the_files_are_called():
    options = ConvertOptions(cache_ratio=0.25, calibration=('it\'s "odd": {x}\\ü.txt', "- b #.txt"), dtype="float16")
    spelt_out = replace(options, rope="energy", factorize="svd_whitened")
    assert ConvertOptions.from_dict(yaml.safe_load(_recipe(options))) == spelt_out
    assert ConvertOptions.from_dict(yaml.safe_load(_recipe(ConvertOptions(lossless=True)))).lossless
