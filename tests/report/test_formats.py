import math

import pytest

from kvfold.report.formats import bytes_text, factor_text, label, number_text, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (134_515_008, "134,515,008"),
        (100.0, "100"),
        (29.98224, "29.98"),
        (12345.6, "12,346"),
        (0.00012, "1.20e-04"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7 B"), (7200, "7.0 KiB"), (58_982_400, "56.2 MiB"), (5 * 2**40, "5,120.00 GiB")]
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(("ratio", "text"), [(None, "–"), (1.0013, "1.00x"), (0.426, "0.43x"), (347.2, "347x")])
def test_factors(ratio, text):
    assert factor_text(ratio) == text


@pytest.mark.parametrize(
    ("key", "value", "name", "text"),
    [
        ("peak_memory_bytes", 2**20, "peak memory", "1.0 MiB"),
        ("load_seconds", 1.5, "load", "1.5 s"),
        ("agreement_percent", 61.2, "agreement", "61.2 %"),
        ("cached_equals_uncached", True, "cached equals uncached", "yes"),
        ("window", None, "window", "–"),
        ("files", ["a", "b"], "files", "a, b"),
    ],
)
def test_keys_give_the_unit(key, value, name, text):
    assert (label(key), value_text(key, value)) == (name, text)
