"""`kvfold convert`: turn a model's attention into latent attention within a cache budget."""

from jsonargparse import ArgumentParser, Namespace

from kvfold.cli.command import MODEL_HELP, Command, Result, given_options
from kvfold.progress import Progress

METHOD_OPTIONS = (
    "layout",
    "cache_ratio",
    "qk_rope_head_dim",
    "kv_lora_rank",
    "d_kv",
    "rope",
    "target",
    "factorize",
    "calibration",
    "calibration_weights",
    "calibration_tokens",
    "calibration_window",
    "seed",
    "per_layer",
    "one_shot",
    "polish_minutes",
    "polish_steps",
    "lossless",
    "dtype",
)
"""The options that describe the method: the fields of ConvertOptions, and what a recipe may hold."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=str, help=MODEL_HELP)
    parser.add_argument("out", metavar="OUT", type=str, help="the folder to write")
    parser.add_argument(
        "--config", action="config", metavar="FILE", help="a YAML recipe with any of the flags below; flags override it"
    )
    _add_budget(parser)
    add_method(parser)
    add_calibration(parser)
    _add_fits(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--dtype", type=str, metavar="T", help="float32, bfloat16 or float16 (default: as the checkpoint)"
    )
    output.add_argument("--overwrite", action="store_true", help="replace OUT if it exists, once the new one is whole")
    output.add_argument("--dry-run", action="store_true", help="print the plan (shapes, cache, memory); write nothing")


def _add_budget(parser: ArgumentParser) -> None:
    budget = parser.add_argument_group(
        "cache budget", "one of: a ratio; rotary dims with a rank; rotary dims with d_kv"
    )
    budget.add_argument(
        "--cache-ratio", type=float, metavar="F", help="share of the original cache to keep, above 0 and up to 1"
    )
    budget.add_argument(
        "--qk-rope-head-dim",
        type=int,
        metavar="N",
        help="rotary dims of one rotary head: per KV head in layout per_head, of the one shared head in shared (even)",
    )
    budget.add_argument("--kv-lora-rank", type=int, metavar="N", help="rank of the latent, all KV heads together")
    budget.add_argument("--d-kv", type=int, metavar="N", help="rank of the latent per KV head, as in MHA2MLA")
    budget.add_argument(
        "--per-layer", action="store_true", help="with --cache-ratio: share the cache among the layers by need"
    )
    budget.add_argument(
        "--lossless", action="store_true", help="keep every rotary component and the full rank: the same logits"
    )


def add_method(parser: ArgumentParser) -> None:
    method = parser.add_argument_group("method")
    method.add_argument(
        "--layout",
        type=str,
        metavar="NAME",
        help="rotary keys: shared (one head, as DeepSeek runtimes load it) or per_head (one per KV head) "
        "(default: shared)",
    )
    method.add_argument(
        "--rope",
        type=str,
        metavar="STRATEGY",
        help="which rotary components stay; shared: mixed (the default), assigned, stride, fastest, rorope, rorope-2, "
        "rorope-4, full; per_head: rotation_error (the default), 2-norm, high, low, uniform, full",
    )
    method.add_argument(
        "--target",
        type=str,
        metavar="T",
        help="deepseek: only what can be exported to runtimes that know DeepSeek's attention (see kvfold export)",
    )
    method.add_argument(
        "--factorize",
        type=str,
        metavar="METHOD",
        help="low rank of unrotated keys and values: attention_aware, svd_whitened, pca_balanced, svd_joint, svd_split "
        "(default: attention_aware, or svd_joint where nothing is calibrated)",
    )


def _add_fits(parser: ArgumentParser) -> None:
    fits = parser.add_argument_group("fits on the converted layers")
    fits.add_argument(
        "--one-shot", action="store_true", help="none: neither the closed-form refit (on by default) nor a polish"
    )
    fits.add_argument(
        "--polish-minutes",
        type=float,
        metavar="M",
        help="fit all attention tensors layer by layer for about M minutes (default: 0, no polish)",
    )
    fits.add_argument(
        "--polish-steps",
        type=int,
        metavar="N",
        help="the same by optimiser steps per layer, so that it can be repeated",
    )


def add_calibration(parser: ArgumentParser) -> None:
    calibration = parser.add_argument_group("calibration")
    calibration.add_argument(
        "--calibration",
        nargs="+",
        metavar="TEXT",
        help="what to calibrate on, any of: default (the broad text shipped in the package), sampled (by the model "
        "itself; takes memory for all of it), random (tokens; a little of it, with --one-shot, helps on other text), "
        "paths of plain text files (default: default)",
    )
    calibration.add_argument(
        "--calibration-weights",
        nargs="+",
        type=float,
        metavar="F",
        help="one positive number for each of them, its share of the tokens (default: all alike)",
    )
    calibration.add_argument(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="tokens to calibrate on, all texts together; 0 uses the weights alone (default: 16384)",
    )
    calibration.add_argument(
        "--calibration-window", type=int, metavar="N", help="tokens per calibration sequence (default: 512)"
    )
    calibration.add_argument("--seed", type=int, metavar="N", help="of everything drawn at random (default: 0)")


def run(options: Namespace, progress: Progress) -> Result:
    from kvfold.convert import convert, plan

    method = given_options(options, METHOD_OPTIONS)
    if options.dry_run:
        result = plan(options.model, **method).to_dict()
    else:
        result = convert(options.model, options.out, overwrite=options.overwrite, progress=progress, **method).to_dict()
    if options.target is None:
        return result
    return result | {"runtimes": _runtimes(result.get("plan", result)["layers"][0])}


def _runtimes(layer: Result) -> list[Result]:
    """What each runtime would cache of layers like this one, once they are exported."""
    from kvfold.export import runtime_costs

    target = layer["target"]
    costs = runtime_costs(target["kv_lora_rank"], target["qk_rope_head_dim"], layer["elements_before"])
    return [cost.to_dict() for cost in costs]


def show(result: Result) -> None:
    from kvfold.report.runtime_tables import show_runtimes
    from kvfold.report.tables import show_conversion

    show_conversion(result)
    if "runtimes" in result:
        show_runtimes(result["runtimes"])


COMMAND = Command(
    name="convert",
    summary="turn a model's attention into latent attention within a cache budget",
    usage="MODEL OUT [options]",
    description=(
        "Convert MODEL to multi-head latent attention within a cache budget and write OUT: weights, tokenizer, recipe "
        "and a model card with what was measured. One layer is in memory at a time."
    ),
    example=(
        "kvfold convert smollm2 smollm2-mla --cache-ratio 0.3125 --polish-minutes 15\n"
        "kvfold convert smollm2 out --layout per_head --rope 2-norm --qk-rope-head-dim 8 --d-kv 32\n"
        "kvfold convert smollm2 out --config recipe.yaml --dry-run"
    ),
    add_arguments=add_arguments,
    run=run,
    show=show,
)
