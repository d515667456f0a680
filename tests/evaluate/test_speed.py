import pytest
import torch

from kvfold.errors import OptionError
from kvfold.evaluate import decode_speed, quantized_cache_factory
from kvfold.evaluate.memory import memory_growth


def test_models_are_compared_with_the_first(llama, deepseek):
    steps = []
    first, second = decode_speed(
        {"grouped": llama, "latent": deepseek},
        cached_tokens=20,
        batch=2,
        new_tokens=3,
        repeats=2,
        progress=lambda *step: steps.append(step),
    )
    assert (first.name, second.name) == ("grouped", "latent")
    assert first.ratio == 1
    assert first.ratio_range == (1, 1)
    for speed in (first, second):
        low, high = speed.tokens_per_second_range
        assert 0 < low <= speed.tokens_per_second <= high
        assert speed.ratio_range[0] <= speed.ratio <= speed.ratio_range[1]
        assert speed.peak_bytes >= speed.cache_bytes
    assert first.cache_bytes == 2 * 2 * 20 * 64 * 4
    assert second.cache_bytes == 2 * 2 * 20 * 40 * 4
    assert steps[-1] == (6, 6)
    assert first.to_dict()["cached_tokens"] == 20


def test_caches_that_cannot_be_cropped(llama, mistral):
    factories = {"int4": quantized_cache_factory(llama.config)}
    speeds = decode_speed(
        {"int4": llama, "window": mistral}, cached_tokens=20, new_tokens=2, repeats=1, cache_factories=factories
    )
    assert len(speeds) == 2


def test_cache_bytes(llama):
    (speed,) = decode_speed({"model": llama}, cached_tokens=600, new_tokens=1, repeats=1)
    assert speed.cache_bytes == 2 * 600 * 64 * 4


@pytest.mark.parametrize("name", ["cached_tokens", "batch", "new_tokens", "repeats"])
def test_numbers_out_of_range(llama, name):
    numbers = {"cached_tokens": 4, name: 0}
    with pytest.raises(OptionError, match=f"{name} must be at least 1, not 0"):
        decode_speed({"model": llama}, **numbers)


def test_memory_growth_sees_an_allocation():
    with memory_growth(torch.device("cpu")) as growth:
        block = torch.ones(64 * 2**20)
        del block
    if growth.peak_bytes is None:
        pytest.skip("the system does not tell")
    assert 200 * 2**20 < growth.peak_bytes < 400 * 2**20
