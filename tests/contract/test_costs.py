"""The costs that a spec names are those of the module."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

CONFIG = LlamaConfig(num_hidden_layers=1)


def test_parameters(layer):
    spec = layer.module.spec
    sizes = dict.fromkeys(spec.projection_parameters(), 0) | {"o_proj": 0}
    for name, parameter in layer.module.named_parameters():
        sizes[name.split(".")[0]] += parameter.numel()
    output = sizes.pop("o_proj")
    assert {name: size for name, size in spec.projection_parameters().items() if size} == {
        name: size for name, size in sizes.items() if size
    }
    assert spec.parameters() == sum(sizes.values()) + output


@pytest.mark.parametrize(("new", "cached"), [(1, 11), (4, 11)])
@pytest.mark.parametrize("path", ["expanded", "absorbed", None])
def test_flops(layer, path, new, cached):
    spec = layer.module.spec
    if path == "absorbed" and spec.absorbed_flops(1, 1) is None:
        pytest.skip("this variant has one path")
    cache = DynamicCache(config=CONFIG)
    past = cached - new
    with torch.no_grad():
        if past:
            layer.module(layer.hidden[:, :past], layer.tables(slice(past)), None, cache=cache)
        layer.module.path = path
        mask = torch.ones(1, 1, new, cached, dtype=torch.bool).tril(past)
        with FlopCounterMode(display=False) as counter:
            layer.module(layer.hidden[:, past:cached], layer.tables(slice(past, cached)), mask, cache=cache)
    assert counter.get_total_flops() == 2 * spec.flops(new, cached, path)  # a batch of two


def test_the_cheaper_path_is_taken(spec):
    absorbed = spec.absorbed_flops(1, 10**5)
    if absorbed is None:
        assert spec.cheaper_path(1, 10**5) == "expanded"
    else:
        assert spec.flops(1, 10**5) == spec.flops(1, 10**5, "absorbed") <= spec.flops(1, 10**5, "expanded")


def test_tensor_parallel_degrees(spec):
    (first_heads, first_width), (second_heads, second_width) = spec.cached_shapes()
    assert spec.cached_elements_per_device(1) == spec.cached_elements()
    for degree in (1, 2, 3, 6, 100):
        expected = max(-(-first_heads // degree), 1) * first_width + max(-(-second_heads // degree), 1) * second_width
        assert spec.cached_elements_per_device(degree) == expected
    assert spec.cached_elements_per_device(100) == first_width + second_width
