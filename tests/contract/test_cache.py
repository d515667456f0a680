"""What is cached, and that decoding from it is the same as seeing everything at once."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

from kvfold.evaluate import cache_elements, forward_cached

CACHES = {
    "dynamic": lambda model, tokens: DynamicCache(config=model.config),
    "static": lambda model, tokens: StaticCache(config=model.config, max_cache_len=tokens),
}
CHUNKS = {"steps": [1] * 12, "prefill, steps and chunks": [4, 1, 1, 1, 3, 2]}
MIXED = CHUNKS["prefill, steps and chunks"]


@torch.no_grad()
def decoded(model, ids, cache, chunks, mask=None):
    logits, position = [], 0
    for part in ids.split(chunks, dim=1):
        position += part.shape[1]
        arguments = {} if mask is None else {"attention_mask": mask[:, :position]}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            arguments["position_ids"] = positions[:, position - part.shape[1] : position]
        logits.append(forward_cached(model, part, cache, **arguments).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_decoding_equals_prefill(model, ids, kind, chunks):
    expected = model(input_ids=ids, use_cache=False).logits
    cache = CACHES[kind](model, 12)
    torch.testing.assert_close(decoded(model, ids, cache, CHUNKS[chunks]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CACHES)
def test_cached_elements_are_those_of_the_spec(model, spec, ids, kind):
    cache = CACHES[kind](model, 12)
    decoded(model, ids, cache, [6, 6])
    assert cache_elements(cache) == 2 * 2 * 12 * spec.cached_elements()
    widths = [heads * width for heads, width in spec.cached_shapes()]
    for layer in cache.layers:
        assert [layer.keys[0, :, 0].numel(), layer.values[0, :, 0].numel()] == widths


def test_paths_agree(model, spec, ids):
    if spec.absorbed_flops(1, 1) is None:
        pytest.skip("this variant has one path")
    results = []
    for path in ("expanded", "absorbed"):
        for module in model.attention_modules():
            module.path = path
        results.append(decoded(model, ids, DynamicCache(config=model.config), MIXED))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "implementation"), [("dynamic", "eager"), ("static", "sdpa")])
def test_left_padded_batch_equals_single_sequences(model, ids, kind, implementation):
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    batch = decoded(model, ids * mask, CACHES[kind](model, 12), MIXED, mask)
    first = decoded(model, ids[:1], CACHES[kind](model, 12), [12])
    second = decoded(model, ids[1:, 5:], CACHES[kind](model, 7), [7])
    torch.testing.assert_close(batch[:1], first, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch[1:, 5:], second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "implementation"), [("dynamic", "sdpa"), ("static", "eager")])
@torch.no_grad()
def test_sliding_window(spec, model_of, ids, kind, implementation):
    model = model_of(spec, "mistral", sliding_window=5)
    model.set_attn_implementation(implementation)
    expected = model(input_ids=ids, use_cache=False).logits
    for chunks in CHUNKS.values():
        cache = CACHES[kind](model, 12)
        torch.testing.assert_close(decoded(model, ids, cache, chunks), expected, rtol=1e-4, atol=1e-5)
        assert max(layer.keys.shape[2] for layer in cache.layers) <= 5
    # Two layers of five tokens each reach back eight tokens, and no further.
    changed = ids.clone()
    changed[:, :3] = 31 - changed[:, :3]
    difference = (model(input_ids=changed, use_cache=False).logits - expected).abs().amax((0, 2))
    assert difference[10] > 1e-4
    assert difference[11] < 1e-6
