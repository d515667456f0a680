"""A GGUF file in llama.cpp, in the package xllamacpp. Run as `doctor.probe` says, without kvfold.

Tokens are not sampled but taken from the text, one at a time, so that the text goes on where nothing is told.
"""

import json
import os
import re
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp

request = json.loads(Path(sys.argv[1]).read_text())
prompt, text_ids = request["prompt"], request["prompt"] + request["following"]
log = Path(sys.argv[2]).with_suffix(".log")
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)  # llama.cpp writes past Python's sys.stderr

params = xllamacpp.CommonParams()
params.model.path = request["export"]
params.n_ctx, params.n_parallel, params.warmup, params.verbosity = request["cells"], 1, False, 5
params.cpuparams.n_threads = max(1, (os.cpu_count() or 1) // 2)  # threads that spin for one without a core take minutes
if request["settings"].get("cache") == "f32":
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
if request["settings"].get("flash_attention") is False:
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)


def call(route: str, **body: Any) -> dict[str, Any]:
    data = json.dumps(body).encode()
    asked = urllib.request.Request(server.listening_address + route, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answered:
        return json.load(answered)


def likeliest(place: int, *, cached: bool) -> dict[int, float]:
    """Of the token behind `text_ids[: place + 1]`, all of which or only the last is computed."""
    before = text_ids[: place + 1]
    found = call("/completion", prompt=before, n_predict=1, n_probs=request["top"], temperature=0, cache_prompt=cached)
    # Nothing is told of a token that ends the text or ends within a character.
    steps = found.get("completion_probabilities", ())
    return {token["id"]: token["logprob"] for step in steps for token in step["top_logprobs"]}


# Each place is a prompt of its own, so that some are enough.
prefill = {place: likeliest(place, cached=False) for place in request["places"][1::3]}
decode = {place: likeliest(place, cached=True) for place in range(len(prompt), len(text_ids))}
token_ids = call("/tokenize", content=request["text"], add_special=False)["tokens"]
size = re.search(
    r"llama_kv_cache: size = +[\d.]+ MiB \( *(\d+) cells, +(\d+) layers.*?"
    r"K \((\w+)\): +([\d.]+) MiB, V \(\w+\): +([\d.]+) MiB",
    log.read_text(errors="replace"),
)
elements = None
if size is not None:
    cells, layers, kind, keys, values = size.groups()
    width = {"f32": 4, "f16": 2, "bf16": 2}[kind]
    elements = (float(keys) + float(values)) * 2**20 / (int(cells) * int(layers) * width)
answer = {
    "version": version("xllamacpp"),
    "sequence": text_ids,
    "prefill": prefill,
    "decode": decode,
    "cached_elements": elements,
    "token_ids": token_ids,
}
Path(sys.argv[2]).write_text(json.dumps(answer))
