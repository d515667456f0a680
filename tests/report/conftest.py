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


def tradeoff_points(
    name: str, ratios: dict[int, float], *, cache: str = "bfloat16", measured: bool = True
) -> list[dict]:
    """Points of one method by their bytes per token; the original has 1000 bytes and a perplexity of 20."""
    return [
        {
            "name": name,
            "cache": cache,
            "cache_ratio": size / 1000,
            "bytes_per_token": size,
            "qk_rope_head_dim": None if name == "original" else 8,
            "kv_lora_rank": None if name == "original" else 24,
            "predicted_perplexity": None if measured else 20 * ratio,
            "perplexity": 20 * ratio if measured else None,
        }
        for size, ratio in ratios.items()
    ]


ONE_METHOD = (
    *tradeoff_points("original", {563: 1.001}, cache="int8"),
    *tradeoff_points("original", {313: 1.02}, cache="int4"),
    *tradeoff_points("mixed", {500: 1.2, 313: 1.8, 188: 3.5, 125: 6.0}, measured=False),
    *tradeoff_points("mixed", {500: 1.25, 313: 2.0}),
    *tradeoff_points("mixed", {282: 1.2, 176: 1.8, 106: 3.5, 71: 6.0}, cache="int8", measured=False),
    *tradeoff_points("mixed", {160: 1.25, 100: 1.9, 60: 3.8, 40: 6.6}, cache="int4", measured=False),
)
SEVERAL = (
    *ONE_METHOD,
    *tradeoff_points("assigned", {500: 1.5, 313: 2.4, 188: 5.6, 125: 11.0}),
    *tradeoff_points("rorope", {500: 2.1, 313: 5.0, 188: 14.0, 125: 80.0}),
    *tradeoff_points("2-norm + svd_joint", {500: 120.0, 313: 226.0, 188: 1041.0, 125: 1751.0}),
)


@pytest.fixture(params=[ONE_METHOD, SEVERAL, ()], ids=["one method", "several", "none"])
def any_tradeoff(request) -> dict:
    return tradeoff_of(request.param)


@pytest.fixture
def tradeoff() -> dict:
    return tradeoff_of(SEVERAL)


def tradeoff_of(points) -> dict:
    return {
        "model": "tiny <model>",
        "text": {"name": "a novel", "context": 512, "windows": 4},
        "original": {"bytes_per_token": 1000, "perplexity": 20.0},
        "points": copy.deepcopy(list(points)),
    }
