"""Text that says little, and layers that do nothing, give finite weights in every method."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvfold import convert
from kvfold.convert.assemble import exact_layer, fold_layer
from kvfold.convert.factorize import FACTORIZATIONS
from kvfold.convert.options import ConvertOptions, resolve_budget
from kvfold.convert.plan import target_spec
from kvfold.convert.rotary import LAYOUTS
from kvfold.errors import TextError

STRATEGIES = [(layout, name) for layout in LAYOUTS for name in LAYOUTS[layout].strategies if name != "full"]

TEXTS = {
    "fewer tokens than the width": lambda hidden: hidden[:1, :16],
    "the same input everywhere": lambda hidden: hidden[:1, :1].expand(2, 40, -1),
    "two directions": lambda hidden: hidden[:, :, :2] @ hidden[0, :2],
    "one token": lambda hidden: hidden[:1, :1],
    "nothing": torch.zeros_like,
}
PRUNED = ("query", "key", "value", "output")


def folded(weights, statistics, layout, strategy, factorize):
    options = ConvertOptions(layout=layout, rope=strategy, qk_rope_head_dim=4, kv_lora_rank=6, factorize=factorize)
    target = target_spec(weights.spec, LAYOUTS[layout], resolve_budget(options, weights.spec))
    split = options.strategy.split(weights, statistics, 2)
    return exact_layer(weights, split, target)[1], fold_layer(weights, split, statistics, target, factorize)


def check(tensors):
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), name
        if tensor.is_floating_point():
            assert tensor.abs().max() < 1e12, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("layout", "strategy"), STRATEGIES)
def test_text_that_says_little(make_layer, observe, layout, strategy, text, dtype):
    for width, biases in ((40, True), (12, False)):  # more columns than rows in the low-rank stage, and fewer
        hidden = torch.randn(2, 40, width, generator=torch.Generator().manual_seed(1))
        weights = make_layer(width=width, biases=biases)
        statistics = observe(weights, TEXTS[text](hidden)).to(dtype)
        weights = cast(weights, dtype)
        for factorize in FACTORIZATIONS:
            for tensors in folded(weights, statistics, layout, strategy, factorize):
                check(tensors)


@pytest.mark.parametrize("pruned", [(name,) for name in PRUNED] + [PRUNED])
@pytest.mark.parametrize(("layout", "strategy"), STRATEGIES)
def test_pruned_layers(make_layer, observe, hidden, layout, strategy, pruned):
    weights = make_layer()
    zeros = {name: torch.zeros_like(getattr(weights, name)) for name in pruned}
    zeros |= {f"{name}_bias": torch.zeros_like(getattr(weights, f"{name}_bias")) for name in pruned}
    weights = replace(weights, **zeros)
    for factorize in FACTORIZATIONS:
        for tensors in folded(weights, observe(weights, hidden), layout, strategy, factorize):
            check(tensors)


def cast(weights, dtype):
    tensors = {name: value.to(dtype) for name, value in vars(weights).items() if isinstance(value, torch.Tensor)}
    return replace(weights, **tensors)


WHOLE = {
    "mixed": {"one_shot": True},
    "mixed, refit": {},
    "mixed, polish": {"polish_steps": 2},
    "assigned": {"rope": "assigned"},
    "stride": {"rope": "stride", "factorize": "svd_whitened"},
    "fastest": {"rope": "fastest", "factorize": "svd_joint"},
    "rorope": {"rope": "rorope", "factorize": "pca_balanced"},
    "rotation_error": {"layout": "per_head", "factorize": "svd_whitened"},
    "2-norm": {"layout": "per_head", "rope": "2-norm", "factorize": "svd_joint"},
}


@pytest.mark.parametrize("method", WHOLE)
def test_a_conversion_on_fewer_tokens_than_the_width_is_usable(save_model, text, tmp_path, method):
    """Closer to the original than a model that has nothing to do with it (1.41)."""
    folder = save_model()
    ids = torch.randint(3, 30, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
        convert(
            folder,
            tmp_path / "out",
            cache_ratio=0.5,
            calibration=[text],
            calibration_tokens=16,
            calibration_window=16,
            **WHOLE[method],
        )
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=ids).logits
    assert logits.isfinite().all()
    assert float((logits - expected).norm() / expected.norm()) < 1.2


WORDS = {
    "three words": "a b c " * 30,
    "one word but for two tokens": "a " * 60 + "b c " + "a " * 60,
    "nearly all unknown": "? " * 60 + "a b c ? " * 2 + "! " * 60,
}
METHODS = [
    (layout, rope, factorize, "one word but for two tokens")
    for layout, rope in STRATEGIES
    for factorize in FACTORIZATIONS
] + [
    (layout, LAYOUTS[layout].default, "attention_aware", words)
    for layout in LAYOUTS
    for words in ("three words", "nearly all unknown")
]


@pytest.mark.parametrize(("layout", "rope", "factorize", "words"), METHODS)
def test_a_conversion_on_a_few_words_is_finite(save_model, tmp_path, layout, rope, factorize, words):
    (tmp_path / "text.txt").write_text(WORDS[words])
    calibration = {"calibration_tokens": 64, "calibration_window": 16, "calibration": [str(tmp_path / "text.txt")]}
    method = {"layout": layout, "rope": rope, "factorize": factorize, "qk_rope_head_dim": 4, "kv_lora_rank": 12}
    convert(save_model(num_hidden_layers=1), tmp_path / "out", **calibration, **method)
    check(load_file(tmp_path / "out/model.safetensors"))


REFUSED = {
    "one word again and again": ("a " * 80, "the 64 calibration tokens are 1 different one(s), repeated: give another"),
    "two words": ("a b " * 40, "the 64 calibration tokens are 2 different one(s), repeated: give another"),
    "all unknown": ("? ! " * 40, "the 64 calibration tokens are 1 different one(s), repeated: give another"),
    "very short": ("a b c", "text.txt' has 3 tokens, 64 are needed: give more text"),
    "white space": (" \n" * 80, "text.txt is empty: give a file with some text in it."),
    "zeros": ("\0" * 80, "text.txt is binary, it holds NUL characters: give a plain text file."),
}


@pytest.mark.parametrize("fits", [{"one_shot": True}, {"polish_steps": 2}, {"per_layer": True}])
@pytest.mark.parametrize("name", REFUSED)
def test_text_of_no_use_is_refused(save_model, tmp_path, one_line, name, fits):
    path = tmp_path / "text.txt"
    words, message = REFUSED[name]
    path.write_text(words)
    calibration = {"calibration": [str(path)], "calibration_tokens": 64, "calibration_window": 16}
    with pytest.raises(TextError, match=re.escape(message)) as error:
        convert(save_model(num_hidden_layers=1), tmp_path / "out", cache_ratio=0.5, **calibration, **fits)
    one_line(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "text.txt"]
