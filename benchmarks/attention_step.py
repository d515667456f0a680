"""Time of a training step of each attention beside transformers' own Llama of the same shape, in alternating steps.

Run: python benchmarks/attention_step.py [--rounds N]

All shapes have the same feed-forward width: what differs is attention. Forward and backward are timed apart.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from result_file import ResultFile
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from kvfold.allocator import keep_freed_memory
from kvfold.lab import Architecture, new_model

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1408,
    "vocab_size": 2048,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "MHA": {"attention": "mha"},
    "MQA": {"attention": "mqa"},
    "GQA-2": {"attention": "gqa", "num_key_value_heads": 2},
    "GTA-2": {"attention": "gta", "num_key_value_heads": 2},
    "MLA": {"attention": "mla"},
    "GLA-2": {"attention": "gla"},
    "GLAq-2": {"attention": "glaq", "q_lora_rank": 256},
    "MLRA-2": {"attention": "mlra", "branches": 2},
    "MLRA-4": {"attention": "mlra", "branches": 4},
}
BATCH, TOKENS, WARM_UP = 2, 512, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/attention_step.json"))
    arguments = parser.parse_args()
    keep_freed_memory()
    results = ResultFile(arguments.out, shape=SHAPE, batch=BATCH, tokens=TOKENS, rounds=arguments.rounds)
    for name, attention in VARIANTS.items():
        results.row(name, lambda a=attention: beside_llama(Architecture(**SHAPE | a), arguments.rounds))


def beside_llama(shape: Architecture, rounds: int) -> dict[str, Any]:
    """Medians of the ratios of steps that follow each other; of heads that share keys the Llama has as many."""
    kv_heads = shape.num_key_value_heads or (1 if shape.attention == "mqa" else shape.num_attention_heads)
    config = LlamaConfig(**SHAPE, num_key_value_heads=kv_heads, tie_word_embeddings=True)
    models = [AutoModelForCausalLM.from_config(config), new_model(shape, seed=0)]
    ids = torch.randint(SHAPE["vocab_size"], (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    times = [[step(model, ids) for model in models] for _ in range(rounds + WARM_UP)][WARM_UP:]
    ratios = {part: [pair[1][part] / pair[0][part] for pair in times] for part in ("forward", "backward", "step")}
    return {
        **{f"{part}_ratio": statistics.median(values) for part, values in ratios.items()},
        "step_ratio_range": [min(ratios["step"]), max(ratios["step"])],
        "llama_step_seconds": statistics.median(pair[0]["step"] for pair in times),
    }


def step(model: Any, ids: Tensor) -> dict[str, float]:
    """Seconds of one training step without the optimiser."""
    model.train()
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    model.zero_grad()
    return {"forward": middle - start, "backward": end - middle, "step": end - start}


if __name__ == "__main__":
    main()
