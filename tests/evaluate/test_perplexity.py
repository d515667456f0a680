import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache

from kvfold.errors import OptionError, TextError
from kvfold.evaluate import perplexity, quantized_cache_factory

module = importlib.import_module("kvfold.evaluate.perplexity")  # the package's own attribute is the function


def naive(model, ids, context, windows):
    losses = []
    with torch.no_grad():
        for window in ids[: context * windows].split(context):
            logits = model(input_ids=window[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return torch.cat(losses).mean().exp().item()


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_it_is_the_naive_mean(llama, token_ids, batch):
    result = perplexity(llama, token_ids, context=50, batch=batch)
    assert (result.windows, result.tokens) == (6, 6 * 49)
    assert result.value == pytest.approx(naive(llama, token_ids, 50, 6), rel=1e-5)
    assert result.value == pytest.approx(math.exp(result.nats_per_token))


@pytest.mark.parametrize("name", ["llama", "deepseek", "mistral"])
def test_a_lossless_cache_changes_nothing(name, token_ids, request):
    model = request.getfixturevalue(name)
    plain = perplexity(model, token_ids, context=70, windows=3)
    cached = perplexity(
        model, token_ids, context=70, windows=3, cache_factory=lambda: DynamicCache(config=model.config)
    )
    assert cached.value == pytest.approx(plain.value, rel=1e-5)


def test_logits_in_steps_change_nothing(llama, token_ids, monkeypatch):
    whole = perplexity(llama, token_ids, context=60, windows=4)
    monkeypatch.setattr(module, "LOGITS_BYTES", 7 * 4 * 128 * 4)  # seven tokens at a time
    assert perplexity(llama, token_ids, context=60, windows=4).value == pytest.approx(whole.value, rel=1e-5)


def test_a_coarse_cache_is_seen(llama, token_ids):
    plain = perplexity(llama, token_ids, context=100)
    coarse = perplexity(llama, token_ids, context=100, cache_factory=quantized_cache_factory(llama.config, nbits=2))
    assert coarse.nats_per_token != pytest.approx(plain.nats_per_token, abs=1e-7)


def test_progress_ends_at_the_number_of_windows(llama, token_ids):
    seen = []
    perplexity(llama, token_ids, context=50, windows=5, batch=2, progress=lambda *step: seen.append(step))
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_an_overflow_is_infinite(llama, token_ids, monkeypatch):
    monkeypatch.setattr(module, "_score", lambda *arguments: 1e6)
    assert perplexity(llama, token_ids, context=50, windows=1).value == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context must be at least 2, not 1"),
        ({"windows": 0}, "windows must be at least 1, not 0"),
        ({"batch": 0}, "batch must be at least 1, not 0"),
    ],
)
def test_numbers_out_of_range(llama, token_ids, options, message):
    with pytest.raises(OptionError, match=message):
        perplexity(llama, token_ids, **options)


@pytest.mark.parametrize(("windows", "needed"), [(None, 512), (2, 1024)])
def test_a_short_text_says_what_is_needed(llama, token_ids, windows, needed):
    with pytest.raises(TextError, match=rf"the text has 300 tokens, but . windows of 512 need {needed}"):
        perplexity(llama, token_ids, windows=windows)
