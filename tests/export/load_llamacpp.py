"""Run by `test_gguf.py` in a process of its own: log-probabilities of the next token in llama.cpp, and its log."""

import json
import sys

import xllamacpp

path, ids = sys.argv[1], json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 5
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
answer = server.handle_completions({"prompt": ids, "max_tokens": 4, "temperature": 0, "logprobs": 10})
print(json.dumps([step["top_logprobs"] for step in answer["choices"][0]["logprobs"]["content"]]))
