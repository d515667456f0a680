"""A folder that does not fit together raises one line; it never loads with random weights."""

import json
import re

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvfold import load_model
from kvfold.errors import CheckpointError, KvfoldError


def change(layer, **values):
    def edit(config):
        config["attention"][layer] |= values

    return edit


def drop(key):
    def edit(config):
        del config[key]

    return edit


def shorten(config):
    config["attention"].pop()


CONFIGS = {
    "rank": (
        change(0, kv_lora_rank=14),
        "tensor model.layers.0.self_attn.k_b_proj.weight has shape (8, 12), its config says (8, 14).",
    ),
    "no attention": (drop("attention"), "the kvfold config has no 'attention': add one spec, or one per layer."),
    "layer count": (shorten, "the kvfold config has 1 attention specs for 2 layers."),
    "unknown kind": (change(1, kind="latnt"), "unknown attention kind 'latnt'. Did you mean 'latent'?"),
    "extra key": (change(1, rank=3), "unknown field of latent attention 'rank'."),
    "type": (change(0, latent_norm="yes"), "latent_norm must be true or false, got 'yes'."),
    "heads": (
        change(0, num_attention_heads=8),
        "num_attention_heads of layer 0 is 8 in 'attention' and 4 in 'text_config'.",
    ),
    "contradiction": (change(1, latent_heads=3), "latent_heads=3 must divide kv_lora_rank=16."),
    "not an object": (
        lambda config: config.update(attention=["latent", "latent"]),
        "the kvfold config is damaged: an attention spec needs a 'kind'",
    ),
    "not a list": (lambda config: config.update(attention="latent"), "attention"),
    "no text config": (drop("text_config"), "the kvfold config has no 'text_config'"),
    "unknown base": (lambda config: config["text_config"].update(model_type="gpt2"), "gpt2"),
    "norm added": (change(0, latent_norm=True), "lacks tensor model.layers.0.self_attn.kv_a_layernorm.weight"),
    "norm removed": (
        change(1, latent_norm=False),
        "has the unexpected tensor model.layers.1.self_attn.kv_a_layernorm.weight",
    ),
}


@pytest.mark.parametrize("load", [load_model, AutoModelForCausalLM.from_pretrained], ids=["load_model", "auto"])
@pytest.mark.parametrize("name", CONFIGS)
def test_config_that_was_tampered_with(folder, name, load, one_line):
    edit, message = CONFIGS[name]
    path = folder / "config.json"
    values = json.loads(path.read_text("utf-8"))
    edit(values)
    path.write_text(json.dumps(values), "utf-8")
    with pytest.raises(KvfoldError, match=re.escape(message)) as error:
        load(folder)
    one_line(error)


V_B = "model.layers.1.self_attn.v_b_proj.weight"


def remove(tensors):
    del tensors[V_B]


def rename(tensors):
    tensors["model.layers.1.self_attn.v_up.weight"] = tensors.pop(V_B)


def add(tensors):
    tensors["model.layers.7.self_attn.v_b_proj.weight"] = tensors[V_B].clone()


def remove_index(tensors):
    del tensors["model.layers.0.self_attn.rotary_index"]


def out_of_range(tensors):
    tensors["model.layers.0.self_attn.rotary_index"][0, 0] = 4


def negative(tensors):
    tensors["model.layers.1.self_attn.rotary_index"][0, 0] = -1


def narrow(tensors):
    tensors[V_B] = tensors[V_B][:, :4].contiguous()


WEIGHTS = {
    "missing": (remove, f"lacks tensor {V_B}"),
    "renamed": (rename, f"lacks tensor {V_B}"),
    "extra": (add, "has the unexpected tensor model.layers.7.self_attn.v_b_proj.weight"),
    "index missing": (remove_index, "lacks tensor model.layers.0.self_attn.rotary_index"),
    "index too large": (out_of_range, "rotary_index of layer 0 points outside the 4 frequencies of the base model."),
    "index negative": (negative, "rotary_index of layer 1 points outside the 4 frequencies of the base model."),
    "shape": (narrow, f"tensor {V_B} has shape (16, 4), its config says (16, 8)."),
}


@pytest.mark.parametrize("load", [load_model, AutoModelForCausalLM.from_pretrained], ids=["load_model", "auto"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_do_not_fit_the_config(folder, name, load, one_line):
    edit, message = WEIGHTS[name]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        load(folder)
    one_line(error)
