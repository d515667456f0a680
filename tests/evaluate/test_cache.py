import copy
import importlib.util

import pytest
import torch
from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

from kvfold.errors import UnknownNameError
from kvfold.evaluate import cache_bytes, cache_elements, forward_cached, measure_cache, quantized_cache_factory


@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized"])
@pytest.mark.parametrize(("name", "elements"), [("llama", 64), ("deepseek", 40)])
def test_measured_elements_are_those_of_the_architecture(name, elements, kind, request):
    size = measure_cache(request.getfixturevalue(name), kind)
    assert size.elements_per_layer == (elements, elements)
    assert size.elements_per_token_and_layer == elements


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_bytes_follow_the_dtype_of_the_model(llama, kind):
    half = copy.deepcopy(llama).to(torch.bfloat16)
    assert measure_cache(llama, kind).bytes_per_token == 2 * 64 * 4
    assert measure_cache(half, kind).bytes_per_token == 2 * 64 * 2


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_sliding_layer_is_divided_by_the_tokens_it_keeps(mistral, kind):
    assert measure_cache(mistral, kind, tokens=40).elements_per_layer == (64, 64)


def test_a_static_cache_counts_what_it_allocated(llama):
    cache = StaticCache(config=llama.config, max_cache_len=50)
    forward_cached(llama, torch.zeros(1, 3, dtype=torch.int64), cache)
    assert cache_elements(cache) == 2 * 50 * 64
    assert cache_bytes(cache) == 2 * 50 * 64 * 4


def test_batches_count(llama):
    cache = DynamicCache(config=llama.config)
    forward_cached(llama, torch.zeros(3, 5, dtype=torch.int64), cache)
    assert cache_elements(cache) == 2 * 3 * 5 * 64


def test_an_empty_cache_holds_nothing(llama):
    assert cache_bytes(DynamicCache(config=llama.config)) == 0


@pytest.mark.skipif(importlib.util.find_spec("hqq") is None, reason="hqq is not installed")
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 4 + 2 * 32 / 16), (torch.bfloat16, 4 + 2 * 16 / 16)])
def test_the_scales_and_zeros_of_hqq_count(llama, dtype, bits):
    model = copy.deepcopy(llama).to(dtype)
    factory = quantized_cache_factory(model.config, backend="hqq", q_group_size=16)
    size = measure_cache(model, factory())
    assert size.elements_per_layer == (64, 64)
    assert size.bits_per_element == bits


def test_packed_wrapper_tensors_count_their_parts():
    quanto = pytest.importorskip("optimum.quanto")
    x = torch.randn(4, 32)
    scale, shift = quanto.MaxOptimizer()(x, quanto.qint4, 0, 16)
    layer = type("Layer", (), {})()
    layer._quantized_keys = quanto.quantize_weight(x, quanto.qint4, 0, scale, shift, 16)
    cache = type("Held", (), {"layers": [layer]})()
    assert cache_bytes(cache) == 4 * 32 // 2 + 2 * 8 * 4
    assert cache_elements(cache) == 4 * 32


def test_an_unknown_kind_names_the_nearest(llama):
    with pytest.raises(UnknownNameError, match=r"unknown cache 'dinamic'\. Did you mean 'dynamic'"):
        measure_cache(llama, "dinamic")


@pytest.mark.skipif(importlib.util.find_spec("hqq") is None, reason="hqq is not installed")
def test_a_residual_of_unpacked_tokens_is_not_all_that_is_held(llama):
    cache = QuantizedCache("hqq", llama.config, axis_key=1, axis_value=1, q_group_size=16)  # residual of 128 tokens
    assert measure_cache(llama, cache).elements_per_token_and_layer == 64
