"""`generate` in all its modes, with transformers' own caches."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

from kvfold import KvfoldForCausalLM
from kvfold.evaluate import cache_elements
from kvfold.evaluate.quantized import quantized_cache_factory

NEW = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}


def without_cache(model, ids, steps=8):
    """Greedy continuation by whole forward passes."""
    with torch.no_grad():
        for _ in range(steps):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            logits[:, 2] = -torch.inf  # min_new_tokens forbids the end
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids


def test_greedy(model, ids):
    expected = without_cache(model, ids)
    assert torch.equal(model.generate(ids, do_sample=False, **NEW), expected)
    assert torch.equal(model.generate(ids, do_sample=False, use_cache=False, **NEW), expected)
    assert torch.equal(model.generate(ids, do_sample=False, cache_implementation="static", **NEW), expected)


def test_sampling_repeats_with_its_seed(model, ids):
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(model.generate(ids, do_sample=True, temperature=2.0, **NEW))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_beams_with_and_without_cache(model, ids):
    beams = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False, **NEW}
    found = model.generate(ids, **beams)
    assert found.shape == (4, 17)
    assert torch.equal(found, model.generate(ids, use_cache=False, **beams))


def test_left_padded_batch_equals_single_sequences(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    batch = model.generate(ids * mask, attention_mask=mask, do_sample=False, **NEW)
    for row, start in ((0, 0), (1, 4)):
        alone = model.generate(ids[row : row + 1, start:], do_sample=False, **NEW)
        assert torch.equal(batch[row, start:], alone[0])


def test_speculation_crops_the_cache_and_changes_nothing(model, config, ids, randomise):
    expected = without_cache(model, ids[:1])
    assistant = randomise(KvfoldForCausalLM(config), seed=1)
    assert torch.equal(model.generate(ids[:1], do_sample=False, assistant_model=assistant, **NEW), expected)
    repetitive = ids[:1].repeat(1, 3)
    looked_up = model.generate(repetitive, do_sample=False, prompt_lookup_num_tokens=3, **NEW)
    assert torch.equal(looked_up, without_cache(model, repetitive))


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=16),
}


@pytest.mark.parametrize("kind", CACHES)
def test_cache_holds_what_the_specs_say(model, ids, kind):
    cache = CACHES[kind](model.config)
    model.generate(ids, do_sample=False, past_key_values=cache, **NEW)
    # The last token is never fed back; a static cache has the room that it was given.
    assert cache_elements(cache) == 2 * 16 * sum(spec.cached_elements() for spec in model.config.specs())


QUANTISERS = [
    ("grouped", "torch"),
    ("hqq", "hqq"),
    pytest.param("quanto", "optimum.quanto", marks=pytest.mark.slow),  # compiles its kernels on first use
]


@pytest.mark.parametrize(("backend", "package"), QUANTISERS)
def test_quantised_cache(model, ids, backend, package):
    pytest.importorskip(package)
    cache = quantized_cache_factory(model.config, backend=backend, q_group_size=4)()
    output = model.generate(ids, do_sample=False, past_key_values=cache, **NEW)
    assert output.shape == (2, 17)
    assert cache_elements(cache) == 2 * 16 * sum(spec.cached_elements() for spec in model.config.specs())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="an offloaded cache moves tensors between two devices")
def test_offloaded_cache(model, ids):
    expected = without_cache(model, ids)
    moved = model.cuda().generate(ids.cuda(), do_sample=False, cache_implementation="offloaded", **NEW)
    assert torch.equal(moved.cpu(), expected)
