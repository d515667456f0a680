"""Run by `test_deepseek.py` in a process of its own, where kvfold is not there: an export in stock transformers."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
folder, place = map(Path, sys.argv[1:])
model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
assert not any(info.values()), info
if eps := getattr(model.config, "latent_eps_of_test", None):  # of runtimes that have another one there
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.variance_epsilon = eps
ids = torch.load(place / "ids.pt")
with torch.no_grad():
    output = model(ids, use_cache=True)
cache = output["past_key_values"] if "past_key_values" in output else output["cache"]
elements = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) / ids.numel() / len(cache.layers)
greedy = model.generate(ids, max_new_tokens=20, do_sample=False)
assert "kvfold" not in sys.modules
torch.save(
    {"class": type(model).__name__, "logits": output.logits, "elements": elements, "greedy": greedy}, place / "o.pt"
)
