"""A folder in vLLM. Run as `doctor.probe` says, in a process where kvfold is not imported."""

import contextlib
import json
import math
import os
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

request = json.loads(Path(sys.argv[1]).read_text())
log = Path(sys.argv[2]).with_suffix(".log")
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
SPACE = 1
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": str(SPACE),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

from vllm import LLM, SamplingParams  # noqa: E402


def likeliest(found: dict[int, Any]) -> dict[int, float]:
    return {token: value.logprob for token, value in found.items() if math.isfinite(value.logprob)}


def main() -> None:
    prompt, new = request["prompt"], request["decoded"]
    settings = {"dtype": "float32", "max_model_len": request["cells"], "max_logprobs": request["top"]}
    llm = LLM(model=request["export"], **settings | request["settings"])
    sampling = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, logprobs=request["top"], prompt_logprobs=request["top"]
    )
    output = llm.generate({"prompt_token_ids": prompt}, sampling)[0]
    # The entry of a token of the prompt is what was expected before it.
    prefill = {place: likeliest(output.prompt_logprobs[place + 1]) for place in request["places"][:-1]}
    steps = output.outputs[0]
    prefill[len(prompt) - 1] = likeliest(steps.logprobs[0])
    answer = {
        "version": next(each.version for each in distributions() if each.name.startswith("vllm")),
        "sequence": prompt + list(steps.token_ids),
        "prefill": prefill,
        "decode": {len(prompt) - 1 + step: likeliest(found) for step, found in enumerate(steps.logprobs) if step},
        "cached_elements": cached_elements(llm),
        "token_ids": llm.get_tokenizer()(request["text"], add_special_tokens=False).input_ids,
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


def cached_elements(llm: LLM) -> float | None:
    """Of 4 bytes, per token and layer, by the number of tokens that vLLM says its cache has room for."""
    tokens = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text(errors="replace"))
    with contextlib.suppress(AttributeError):
        layers = llm.llm_engine.model_config.hf_config.num_hidden_layers
        return None if tokens is None else SPACE * 2**30 / int(tokens[1].replace(",", "")) / layers / 4
    return None


if __name__ == "__main__":
    main()
