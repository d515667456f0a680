import copy

import pytest

ORIGINAL = {
    "name": "original, bf16 cache",
    "cache_elements": 384,
    "cache_bytes_per_token": 23040.0,
    "cache_percent": 100.0,
    "perplexity": 30.0,
    "perplexity_ratio": 1.0,
    "tokens_per_second": 20.0,
    "decode_ratio": 1.0,
}
RESULTS = {
    "model": "tiny <model>",
    "original": {"attention": "GQA", "layers": 30},
    "conversion": {"layout": "shared", "cache_ratio": 0.3125},
    "evaluation": {"text": "a novel", "context": 512, "windows": 4, "tokens": 2044},
    "rows": [
        ORIGINAL,
        ORIGINAL
        | {
            "name": "kvfold MLA",
            "cache_elements": 120,
            "cache_bytes_per_token": 7200.0,
            "cache_percent": 31.25,
            "perplexity": 120.0,
            "perplexity_ratio": 4.0,
            "tokens_per_second": 24.0,
            "decode_ratio": 1.2,
        },
        ORIGINAL
        | {
            "name": "original, int4 cache",
            "cache_bytes_per_token": 7200.0,
            "cache_percent": 31.25,
            "perplexity": 31.0,
            "perplexity_ratio": 31 / 30,
            "tokens_per_second": None,
            "decode_ratio": None,
        },
    ],
    "per_layer": {"attention_error": [0.1, 0.2, 0.15]},
    "verify": {
        "original": "smollm2",
        "converted": "smollm2-mla",
        "tokens": 256,
        "max_logit_difference": 3.25,
        "mean_logit_difference": 0.4,
        "kl": 0.5,
        "top1_agreement": 0.625,
        "first_diverging_module": "model.layers.0.self_attn",
        "module_errors": {"model.layers.0.self_attn": 0.25, "model.layers.1": 0.5},
        "cached_vs_uncached": 1e-5,
        "absorbed_vs_expanded": 2e-5,
        "printed_bytes_per_token": 14400,
        "measured_bytes_per_token": 14400.0,
        "passed": True,
    },
    "samples": [{"name": "kvfold MLA", "prompt": "Why?", "text": "Because of <b>light</b>."}],
    "timings": {"convert": 61.25},
    "provenance": {
        "commit": "abc",
        "versions": {"torch": "2.13.0"},
        "hardware": {"processor": "a CPU", "cores": 2, "threads": 2, "gpu": None},
        "seed": 0,
        "command": "kvfold demo",
        "date": "2026-11-30T20:00:00+00:00",
    },
}


@pytest.fixture
def results() -> dict:
    return copy.deepcopy(RESULTS)
