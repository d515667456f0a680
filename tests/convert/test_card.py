"""What is written beside the weights can be read back."""

import yaml

from kvfold.convert import ConvertOptions
from kvfold.convert.card import _recipe


def test_the_recipe_is_yaml_whatever_the_files_are_called():
    options = ConvertOptions(cache_ratio=0.25, calibration=('it\'s "odd": {x}\\ü.txt', "- b #.txt"), dtype="float16")
    assert ConvertOptions.from_dict(yaml.safe_load(_recipe(options))) == options
    assert ConvertOptions.from_dict(yaml.safe_load(_recipe(ConvertOptions(lossless=True)))).lossless
