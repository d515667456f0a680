"""Options, budgets and plans: their numbers, and the one line for each mistake."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from kvfold.attention import GroupedSpec
from kvfold.convert.options import ConvertOptions, resolve_budget
from kvfold.convert.plan import make_plan
from kvfold.convert.rotary import LAYOUTS
from kvfold.errors import BudgetError, OptionError, UnknownNameError
from kvfold.families import FAMILIES
from kvfold.texts import CALIBRATION

SMOLLM = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
(SPEC, *_) = FAMILIES["llama"].layer_specs(SMOLLM)


def plan_of(**options):
    return make_plan("smollm", SMOLLM, FAMILIES["llama"], torch.bfloat16, ConvertOptions(**options))


def test_the_published_setting_at_31_percent():
    plan = plan_of(layout="per_head", qk_rope_head_dim=8, d_kv=32, rope="2-norm", factorize="svd_joint")
    target = plan.layers[0].target
    assert (SPEC.cached_elements(), target.cached_elements()) == (384, 120)
    assert (target.rotary_heads, target.qk_rope_head_dim, target.qk_nope_head_dim, target.kv_lora_rank) == (
        3,
        8,
        56,
        96,
    )
    assert plan.kept == 0.3125
    split = plan_of(layout="per_head", qk_rope_head_dim=8, d_kv=32, rope="2-norm", factorize="svd_split")
    assert split.layers == plan.layers
    facts = plan.to_dict()
    assert (facts["elements_before"], facts["elements_after"]) == (30 * 384, 30 * 120)
    assert (facts["bytes_before"], facts["bytes_after"]) == (60 * 384, 60 * 120)
    assert [(group["first"], group["last"], group["count"]) for group in facts["layers"]] == [(0, 29, 30)]
    assert facts["dtype"] == "bfloat16"
    assert plan.estimated_memory_bytes > 0


@pytest.mark.parametrize("layout", ["shared", "per_head"])
@pytest.mark.parametrize("ratio", [0.05, 0.125, 0.3125, 0.5, 1.0])
def test_a_ratio_is_used_up_and_not_exceeded(layout, ratio):
    plan = plan_of(layout=layout, cache_ratio=ratio)
    assert plan.layers[0].target.cached_elements() == int(384 * ratio)


@pytest.mark.parametrize("layout", ["shared", "per_head"])
def test_no_latent_is_wider_than_the_model(layout):
    multi_head = GroupedSpec(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    for ratio in (0.5, 0.75, 1.0):
        budget = resolve_budget(ConvertOptions(layout=layout, cache_ratio=ratio), multi_head)
        kept = budget.kv_lora_rank + budget.rotary_heads * budget.qk_rope_head_dim
        assert budget.kv_lora_rank <= 32
        assert kept == ratio * multi_head.cached_elements()


def test_ratio_at_31_percent_is_the_published_setting():
    per_head = resolve_budget(ConvertOptions(layout="per_head", cache_ratio=0.3125), SPEC)
    assert (per_head.rotary_heads, per_head.qk_rope_head_dim, per_head.kv_lora_rank) == (3, 8, 96)
    shared = resolve_budget(ConvertOptions(layout="shared", cache_ratio=0.3125), SPEC)
    assert shared.rotary_heads == 1
    assert shared.qk_rope_head_dim + shared.kv_lora_rank == 120


@pytest.mark.parametrize("rope", [name for name, strategy in LAYOUTS["shared"].strategies.items() if strategy.single])
@pytest.mark.parametrize("head_dim", [64, 96, 80])
def test_a_ratio_gives_dims_that_the_strategy_can_keep(rope, head_dim):
    spec = GroupedSpec(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim)
    for ratio in (0.05, 0.125, 0.1875, 0.3125, 0.5, 1.0):
        budget = resolve_budget(ConvertOptions(rope=rope, cache_ratio=ratio), spec)
        assert budget.qk_rope_head_dim <= head_dim
        assert budget.qk_rope_head_dim + budget.kv_lora_rank <= ratio * spec.cached_elements()
        if LAYOUTS["shared"].strategies[rope].uniform:
            assert head_dim % budget.qk_rope_head_dim == 0


@pytest.mark.parametrize("layout", ["shared", "per_head"])
def test_lossless_is_the_size_of_the_original(layout):
    plan = plan_of(layout=layout, lossless=True)
    assert plan.kept == 1
    assert plan.layers[0].target.qk_nope_head_dim == 0
    assert (plan.rope, plan.factorize, plan.calibration_tokens) == ("full", "svd_joint", 0)


def test_defaults_depend_on_what_is_asked():
    assert (plan_of(cache_ratio=0.5).rope, plan_of(cache_ratio=0.5).factorize) == ("mixed", "attention_aware")
    assert plan_of(layout="per_head", cache_ratio=0.5).rope == "rotation_error"
    weights_only = plan_of(cache_ratio=0.5, calibration_tokens=0)
    assert (weights_only.factorize, weights_only.calibration_tokens) == ("svd_joint", 0)
    published = {"layout": "per_head", "cache_ratio": 0.5, "rope": "high", "factorize": "svd_split"}
    assert plan_of(**published).calibration_tokens > 0  # the refit reads text
    assert plan_of(**published, one_shot=True).calibration_tokens == 0
    assert plan_of(cache_ratio=0.5).estimated_memory_bytes > weights_only.estimated_memory_bytes


def test_recipe_round_trip():
    options = ConvertOptions(layout="per_head", cache_ratio=0.25, calibration=("a.txt",))
    assert ConvertOptions.from_dict(options.to_dict()) == options
    assert ConvertOptions.from_dict({"lossless": True, "calibration": ["a", "b"]}).calibration == ("a", "b")
    assert ConvertOptions.from_dict({"lossless": True, "calibration": Path("a.txt")}).calibration == ("a.txt",)
    weighted = ConvertOptions.from_dict({"lossless": True, "calibration": ["a", "b"], "calibration_weights": [1, 2]})
    assert weighted.weights == (1.0, 2.0)
    assert ConvertOptions.from_dict({"lossless": True, "calibration_weights": 3}).weights == (3.0,)
    assert ConvertOptions(lossless=True, calibration=("default", "sampled")).weights == (1.0, 1.0)


EXPLICIT = {"qk_rope_head_dim": 8, "kv_lora_rank": 96}
OPTION_MISTAKES = {
    "layout": ({"layout": "perhead"}, UnknownNameError, "unknown layout 'perhead'. Did you mean 'per_head'?"),
    "rope": (
        {"rope": "mixd"},
        UnknownNameError,
        "unknown rope strategy (layout shared) 'mixd'. Did you mean 'mixed'?",
    ),
    "rope of the other layout": (
        {"rope": "2-norm"},
        OptionError,
        "rope strategy '2-norm' belongs to layout per_head; layout shared has mixed, assigned, stride, fastest, "
        "rorope, rorope-2, rorope-4, full.",
    ),
    "method": ({"factorize": "svd"}, UnknownNameError, "unknown factorization 'svd'."),
    "dtype": ({"dtype": "fp16"}, UnknownNameError, "unknown dtype 'fp16'."),
    "no budget": (
        {},
        OptionError,
        "give a budget: cache_ratio, or qk_rope_head_dim with either kv_lora_rank or d_kv, or lossless.",
    ),
    "half a budget": ({"qk_rope_head_dim": 8}, OptionError, "give a budget"),
    "two ranks": ({**EXPLICIT, "d_kv": 32}, OptionError, "give a budget"),
    "two budgets": ({"cache_ratio": 0.5, "d_kv": 8}, OptionError, "give either cache_ratio or d_kv, not both."),
    "ratio of zero": ({"cache_ratio": 0.0}, BudgetError, "cache_ratio must be in (0, 1], got 0.0."),
    "ratio above one": ({"cache_ratio": 1.5}, BudgetError, "cache_ratio must be in (0, 1], got 1.5."),
    "lossless with a budget": ({"lossless": True, "d_kv": 8}, OptionError, "lossless keeps everything"),
    "lossless with a strategy": ({"lossless": True, "rope": "mixed"}, OptionError, "lossless keeps everything"),
    "tokens": (
        {"cache_ratio": 0.5, "calibration_tokens": -1},
        OptionError,
        "calibration_tokens must be 0 or more, got -1.",
    ),
    "rotation_error of weights alone": (
        {"cache_ratio": 0.5, "layout": "per_head", "calibration_tokens": 0},
        OptionError,
        "the rope strategy 'rotation_error' needs calibration text: give calibration_tokens above 0, or take another.",
    ),
    "2-norm of weights alone": (
        {"cache_ratio": 0.5, "layout": "per_head", "rope": "2-norm", "calibration_tokens": 0},
        OptionError,
        "the rope strategy '2-norm' needs calibration text: give calibration_tokens above 0, or take another.",
    ),
    "whitening of weights alone": (
        {"cache_ratio": 0.5, "factorize": "svd_whitened", "calibration_tokens": 0},
        OptionError,
        "svd_whitened needs calibration text: give calibration_tokens above 0, or take svd_joint.",
    ),
    "attention of weights alone": (
        {"cache_ratio": 0.5, "factorize": "attention_aware", "calibration_tokens": 0},
        OptionError,
        "attention_aware needs calibration text: give calibration_tokens above 0, or take svd_joint.",
    ),
    "negative minutes": (
        {"cache_ratio": 0.5, "polish_minutes": -1.0},
        OptionError,
        "polish_minutes must be 0 or a positive number, got -1.0.",
    ),
    "minutes without end": ({"cache_ratio": 0.5, "polish_minutes": float("inf")}, OptionError, "number, got inf."),
    "minutes that are no number": ({"cache_ratio": 0.5, "polish_minutes": float("nan")}, OptionError, "got nan."),
    "negative steps": (
        {"cache_ratio": 0.5, "polish_steps": -2},
        OptionError,
        "polish_steps must be 0 or more, got -2.",
    ),
    "random tokens to fit on": (
        {"cache_ratio": 0.5, "calibration": ("default", "random")},
        OptionError,
        "random calibration tokens are for one_shot: the refit and the polish go wrong on them.",
    ),
    "minutes and steps": (
        {"cache_ratio": 0.5, "polish_minutes": 1.0, "polish_steps": 5},
        OptionError,
        "give either polish_minutes or polish_steps, not both.",
    ),
    "one shot and a polish": (
        {"cache_ratio": 0.5, "polish_steps": 5, "one_shot": True},
        OptionError,
        "one_shot leaves the polish out: give either.",
    ),
    "polish without text": (
        {"cache_ratio": 0.5, "polish_steps": 5, "calibration_tokens": 0},
        OptionError,
        "polish needs calibration text and something to win back: leave it out.",
    ),
    "polish of nothing": ({"lossless": True, "polish_minutes": 1.0}, OptionError, "polish needs calibration text"),
    "per_layer without a ratio": (
        {**EXPLICIT, "per_layer": True},
        OptionError,
        "per_layer shares a cache_ratio among the layers: give one.",
    ),
    "per_layer of lossless": ({"lossless": True, "per_layer": True}, OptionError, "give one."),
    "per_layer without text": (
        {"cache_ratio": 0.5, "per_layer": True, "calibration_tokens": 0},
        OptionError,
        "per_layer needs the rope strategy mixed, attention_aware and calibration text.",
    ),
    "per_layer of the other layout": (
        {"cache_ratio": 0.5, "per_layer": True, "layout": "per_head"},
        OptionError,
        "per_layer needs the rope strategy mixed",
    ),
    "per_layer of a stride": (
        {"cache_ratio": 0.5, "per_layer": True, "rope": "stride"},
        OptionError,
        "per_layer needs",
    ),
    "per_layer of another factorization": (
        {"cache_ratio": 0.5, "per_layer": True, "factorize": "svd_joint"},
        OptionError,
        "per_layer needs",
    ),
    "window": (
        {"cache_ratio": 0.5, "calibration_window": 4},
        OptionError,
        "calibration_window must be 16 tokens or more, got 4.",
    ),
    "seed": ({"cache_ratio": 0.5, "seed": -1}, OptionError, "seed must be between 0 and 4294967295, got -1."),
    "no text": (
        {"cache_ratio": 0.5, "calibration": ()},
        OptionError,
        "calibration is empty: name default, sampled, random or text files, or set calibration_tokens to 0.",
    ),
    "no name": ({"cache_ratio": 0.5, "calibration": ("",)}, OptionError, "calibration is empty: name default"),
    "tokens without end": (
        {"cache_ratio": 0.5, "calibration_tokens": 10**20},
        OptionError,
        f"calibration_tokens must be 16777216 or less, got {10**20}.",
    ),
    "a window without end": ({"cache_ratio": 0.5, "calibration_window": 10**20}, OptionError, "16777216 or less"),
    "one text twice": (
        {"cache_ratio": 0.5, "calibration": ("sampled", "a.txt", "sampled")},
        OptionError,
        "calibration has the same text twice, 'sampled': name it once, with a larger weight.",
    ),
    "one text by two names": (
        {"cache_ratio": 0.5, "calibration": ("b/../a.txt", "./a.txt")},
        OptionError,
        "calibration has the same text twice, 'b/../a.txt' and './a.txt': name it once",
    ),
    "the shipped text by two names": (
        {"cache_ratio": 0.5, "calibration": (str(CALIBRATION), "default")},
        OptionError,
        "calibration.txt' and 'default': name it once",
    ),
    "a weight too few": (
        {"cache_ratio": 0.5, "calibration": ("default", "a.txt"), "calibration_weights": (1.0,)},
        OptionError,
        "calibration_weights has 1 number(s), calibration 2 entry(s): give one number for each.",
    ),
    "fewer windows than texts": (
        {"cache_ratio": 0.5, "calibration": ("default", "a.txt", "b.txt"), "calibration_tokens": 1024},
        OptionError,
        "1024 calibration_tokens are fewer than one window of 512 for each of the 3 calibration entries: raise them to "
        "1536, or lower calibration_window.",
    ),
} | {
    f"a weight of {weight}": (
        {"cache_ratio": 0.5, "calibration": ("default", "a.txt"), "calibration_weights": (1.0, weight)},
        OptionError,
        f"calibration_weights must be positive, finite numbers, got {weight}.",
    )
    for weight in (0.0, -1.0, float("nan"), float("inf"))
}


@pytest.mark.parametrize("name", OPTION_MISTAKES)
def test_option_mistakes(name, one_line):
    options, kind, message = OPTION_MISTAKES[name]
    with pytest.raises(kind, match=re.escape(message)) as error:
        ConvertOptions(**options)
    one_line(error)


def test_unknown_recipe_key(one_line):
    with pytest.raises(UnknownNameError, match="unknown option 'cache_ration'. Did you mean 'cache_ratio'") as error:
        ConvertOptions.from_dict({"cache_ration": 0.5})
    one_line(error)


BUDGET_MISTAKES = {
    "odd": (
        {"qk_rope_head_dim": 7, "kv_lora_rank": 96},
        "qk_rope_head_dim must be an even number of 2 or more, got 7.",
    ),
    "none": (
        {"qk_rope_head_dim": 0, "kv_lora_rank": 96},
        "qk_rope_head_dim must be an even number of 2 or more, got 0.",
    ),
    "negative": ({"qk_rope_head_dim": -2, "kv_lora_rank": 96}, "even number of 2 or more, got -2."),
    "too many dims": (
        {"layout": "per_head", "qk_rope_head_dim": 66, "kv_lora_rank": 96},
        "qk_rope_head_dim 66 exceeds the 64 rotary dims of this model and layout.",
    ),
    "too many shared dims": ({"qk_rope_head_dim": 194, "kv_lora_rank": 96}, "exceeds the 192 rotary dims"),
    "rank": ({"qk_rope_head_dim": 8, "kv_lora_rank": 0}, "kv_lora_rank must be 1 or more, got 0."),
    "negative rank": ({"qk_rope_head_dim": 8, "d_kv": -3}, "d_kv must be 1 or more, got -3."),
    "too much": (
        {"layout": "per_head", "qk_rope_head_dim": 8, "kv_lora_rank": 400},
        "3 x 8 rotary dims + rank 400 = 424 elements per token and layer exceed the original cache of 384: "
        "lower kv_lora_rank to 360, or d_kv to 120.",
    ),
    "full but fewer": (
        {"rope": "full", "qk_rope_head_dim": 8, "kv_lora_rank": 96},
        "the rope strategy 'full' keeps all 192 rotary dims, not 8: give qk_rope_head_dim 192 with kv_lora_rank",
    ),
    "full of a ratio": ({"rope": "full", "cache_ratio": 0.5}, "give qk_rope_head_dim 192 with kv_lora_rank"),
    "no stride": (
        {"rope": "stride", "qk_rope_head_dim": 24, "kv_lora_rank": 96},
        "the rope strategy 'stride' keeps 2, 4, 8, 16, 32, 64 rotary dims of 64, not 24.",
    ),
    "more than one component of a frequency": (
        {"rope": "fastest", "qk_rope_head_dim": 72, "kv_lora_rank": 96},
        "the rope strategy 'fastest' keeps at most 64 rotary dims, not 72.",
    ),
    "too small a ratio": (
        {"layout": "per_head", "cache_ratio": 0.02},
        "cache_ratio 0.02 keeps 7 of 384 elements per token and layer: too few for 3 rotary head(s) of 2 dims; "
        "ask for at least 0.0469.",
    ),
}


@pytest.mark.parametrize("name", BUDGET_MISTAKES)
def test_budget_mistakes(name, one_line):
    options, message = BUDGET_MISTAKES[name]
    with pytest.raises(BudgetError, match=re.escape(message)) as error:
        plan_of(**options)
    one_line(error)


def test_a_fold_that_does_not_fit_is_refused_before_anything_is_read(one_line):
    spec = GroupedSpec(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    options = ConvertOptions(rope="rorope-2", qk_rope_head_dim=6, kv_lora_rank=8)
    message = "the rope strategy 'rorope-2' keeps 2, 4, 12 rotary dims of 12, not 6."
    with pytest.raises(BudgetError, match=message) as error:
        resolve_budget(options, spec)
    one_line(error)


def test_the_ratio_that_an_error_suggests_works():
    for kv_heads in (1, 2, 3, 4, 8):
        spec = GroupedSpec(hidden_size=64, num_attention_heads=24, num_key_value_heads=kv_heads, head_dim=64)
        for layout in ("shared", "per_head"):
            with pytest.raises(BudgetError, match="ask for at least") as error:
                resolve_budget(ConvertOptions(layout=layout, cache_ratio=0.001), spec)
            suggested = float(re.search(r"at least ([\d.]+)\.$", str(error.value))[1])
            assert resolve_budget(ConvertOptions(layout=layout, cache_ratio=suggested), spec).kv_lora_rank > 0


def test_no_ratio_is_suggested_where_none_works():
    spec = GroupedSpec(hidden_size=16, num_attention_heads=8, num_key_value_heads=2, head_dim=2)
    with pytest.raises(BudgetError, match="give qk_rope_head_dim and kv_lora_rank instead"):
        resolve_budget(ConvertOptions(layout="per_head", cache_ratio=1.0), spec)
    explicit = ConvertOptions(layout="per_head", qk_rope_head_dim=2, kv_lora_rank=4)
    assert resolve_budget(explicit, spec).kv_lora_rank == 4
