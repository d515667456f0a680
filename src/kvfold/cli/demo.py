"""`kvfold demo`: convert the embedded model, measure it beside the original, and write a report."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import Command, Result
from kvfold.progress import Progress

if TYPE_CHECKING:
    from kvfold.convert import Plan
    from kvfold.evaluate.cache import CacheFactory

MODEL = "smollm2"
NAME = "SmolLM2-135M-Instruct"
CACHE_RATIO = 0.3125
CONTEXT = 512
WINDOWS = 6
CACHED_TOKENS = 4096
NEW_TOKENS = 8
PROMPT = "The history of the Roman Empire"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model with the cache that it decodes with; None is transformers' DynamicCache."""

    name: str
    model: Any
    cache: "CacheFactory | None" = None


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=str,
        metavar="FOLDER",
        default="demo-report",
        help="the folder for the report; an earlier report is replaced (default: demo-report)",
    )
    parser.add_argument(
        "--converted",
        type=str,
        metavar="FOLDER",
        default="demo-model",
        help="the folder for the converted model; an earlier conversion is replaced (default: demo-model)",
    )


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.checkpoint import refuse_other_content
    from kvfold.convert import convert
    from kvfold.evaluate import quantized_cache_factory, verify
    from kvfold.modeling import load_model
    from kvfold.provenance import provenance
    from kvfold.report import save_report

    refuse_other_content(Path(options.out), "index.html")
    clock = Clock()
    conversion = convert(MODEL, options.converted, cache_ratio=CACHE_RATIO, overwrite=True, progress=progress)
    clock.stop("convert")
    verification = verify(MODEL, options.converted)
    clock.stop("verify")
    original, tokenizer = load_model(MODEL)
    folded, _ = load_model(options.converted)
    contenders = (
        Contender(name="original", model=original),
        Contender(name="kvfold MLA", model=folded),
        Contender(name="original, int4 cache", model=original, cache=quantized_cache_factory(original.config)),
    )
    clock.stop("load")
    speeds = decode_rates(contenders, progress)
    clock.stop("decode")
    scores = perplexities(contenders, tokenizer, progress)
    clock.stop("perplexity")
    samples = [sample(contender, tokenizer) for contender in contenders if contender.cache is None]
    clock.stop("generate")
    sizes = cache_sizes(contenders)
    results = {
        "model": NAME,
        "original": {"model_type": original.config.model_type, "parameters": original.num_parameters()},
        "conversion": facts(conversion.plan),
        "evaluation": scores["evaluation"],
        "rows": [size | score | speed for size, score, speed in zip(sizes, scores["rows"], speeds, strict=True)],
        "per_layer": {f"after {stage}": errors for stage, errors in conversion.stage_errors.items()},
        "stage_losses": conversion.stage_losses,
        "verify": verification.to_dict(),
        "samples": samples,
        "timings": clock.seconds,
        "provenance": provenance(seed=0),
    }
    page = save_report(results, options.out)
    return results | {"page": str(page)}


class Clock:
    """Seconds by stage; each stage starts where the one before it stopped."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._start = now - self._start, now


def facts(plan: "Plan") -> Result:
    """The recipe of a conversion in a few values."""
    values, target = plan.to_dict(), plan.layers[0].target
    chosen = {key: values[key] for key in ("layout", "rope", "factorize", "calibration_tokens")}
    return chosen | {
        "rotary_heads": target.rotary_heads,
        "qk_rope_head_dim": target.qk_rope_head_dim,
        "kv_lora_rank": target.kv_lora_rank,
    }


def decode_rates(contenders: Sequence[Contender], progress: Progress) -> list[Result]:
    """Decode speed of each contender and its ratio to the first, in alternating runs."""
    from kvfold.evaluate import decode_speed

    speeds = decode_speed(
        {contender.name: contender.model for contender in contenders},
        cached_tokens=CACHED_TOKENS,
        new_tokens=NEW_TOKENS,
        cache_factories={contender.name: contender.cache for contender in contenders if contender.cache is not None},
        progress=partial(progress, f"timing decode at {CACHED_TOKENS} cached tokens"),
    )
    return [
        {"tokens_per_second": speed.tokens_per_second, "decode_ratio": speed.ratio, "decode": speed.to_dict()}
        for speed in speeds
    ]


def perplexities(contenders: Sequence[Contender], tokenizer: Any, progress: Progress) -> Result:
    """Perplexity of each contender on the shipped novel, with its ratio to the first."""
    from kvfold.evaluate import perplexity
    from kvfold.texts import EVALUATION, read_text, token_ids

    ids = token_ids(tokenizer, read_text(EVALUATION), minimum=CONTEXT * WINDOWS)
    scores = [
        perplexity(
            contender.model,
            ids,
            context=CONTEXT,
            windows=WINDOWS,
            cache_factory=contender.cache,
            progress=partial(progress, f"perplexity, {contender.name}"),
        )
        for contender in contenders
    ]
    return {
        "evaluation": {
            "text": "The Mysterious Affair at Styles",
            "context": CONTEXT,
            "windows": WINDOWS,
            "tokens": scores[0].tokens,
        },
        "rows": [{"perplexity": score.value, "perplexity_ratio": score.value / scores[0].value} for score in scores],
    }


def sample(contender: Contender, tokenizer: Any) -> Result:
    """How the model goes on after the prompt, always taking the likeliest token."""
    from kvfold.evaluate import continue_prompt

    text = continue_prompt(contender.model, tokenizer, PROMPT, max_new_tokens=64)
    return {"name": contender.name, "prompt": PROMPT, "text": text}


def cache_sizes(contenders: Sequence[Contender]) -> list[Result]:
    """What each cache holds. Rounds the models to bfloat16, as they would be deployed: to be called last."""
    import torch

    from kvfold.evaluate import measure_cache

    sizes = [
        measure_cache(contender.model.to(torch.bfloat16), contender.cache() if contender.cache is not None else None)
        for contender in contenders
    ]
    return [
        {
            "name": contender.name,
            "cache_elements": size.elements_per_token_and_layer,
            "cache_bytes_per_token": size.bytes_per_token,
            "cache_percent": 100 * size.bytes_per_token / sizes[0].bytes_per_token,
        }
        for contender, size in zip(contenders, sizes, strict=True)
    ]


def show(result: Result) -> None:
    from kvfold.report.tables import show_demo

    show_demo(result)
    print(f"\nreport: {result['page']}")


COMMAND = Command(
    name="demo",
    summary="convert SmolLM2-135M, measure it beside the original and write a report",
    usage="[--out FOLDER] [--converted FOLDER] [--json]",
    description=(
        f"Convert {NAME} to latent attention at {CACHE_RATIO:.2%} of its cache, load it back, measure perplexity, "
        "cache bytes and decode speed beside the original and beside an int4 cache of as many bytes, generate text, "
        "and write an HTML page, figures and JSON."
    ),
    example="kvfold demo --out demo-report",
    add_arguments=add_arguments,
    run=run,
    show=show,
)
