"""The command with which a runtime serves an export, with settings that compute the right thing."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfold.errors import OptionError
from kvfold.export.facts import read_facts
from kvfold.export.runtimes import RUNTIMES, check_installed, has_module, runtime_of

LLAMACPP = (
    "import sys, threading, xllamacpp; p = xllamacpp.CommonParams(); "
    "p.model.path, p.hostnames, p.port = sys.argv[1], [sys.argv[2]], int(sys.argv[3]); "
    "s = xllamacpp.Server(p); print('serving on', s.listening_address, flush=True); threading.Event().wait()"
)
"""llama.cpp's server in the package xllamacpp, which has no command."""
VLLM_ON_CPUS = {
    # Some CPUs get AMX_MLA otherwise, which takes no fp32.
    "attention_backend": "CPU_MLA",
    # The rotary operator of its own is wrong for latents.
    "compilation_config": {"custom_ops": ["none"]},
    "enforce_eager": True,
}
"""Settings with which vLLM 0.32 computes the right thing on CPUs, as keyword arguments of its `LLM`."""


def serve_command(
    export: str | Path, *, host: str = "127.0.0.1", port: int = 8000, python: str = sys.executable
) -> list[str]:
    """The command of the runtime that an export was made for; it answers as OpenAI's API does.

    Args:
        export: a folder or .gguf file that `export` made.
        host: address to listen on.
        port: of TCP.
        python: interpreter of the environment in which the runtime is installed.

    Raises:
        OptionError: the export or its runtime is not there.
    """
    path = Path(export).expanduser()
    facts = read_facts(path)
    name = runtime_of(path, facts)
    if not 0 < port < 65536:
        raise OptionError(f"a port is from 1 to 65535, got {port}.")
    place = ["--host", host, "--port", str(port)]
    server = shutil.which("llama-server")
    if name == "llamacpp" and server is not None:
        return [server, "-m", str(path), *place]
    check_installed(RUNTIMES[name], python)
    if name == "llamacpp":
        return [python, "-c", LLAMACPP, str(path), host, str(port)]
    if name == "transformers":
        if not has_module("uvicorn", python):
            raise OptionError(f"transformers has no server for {python}: pip install 'transformers[serving]'.")
        return [str(Path(python).with_name("transformers")), "serve", str(path), *place]
    if name == "sglang":
        return [python, "-m", "sglang.launch_server", "--model-path", str(path), *place]
    # vLLM takes fp32 weights as fp16 where nothing is said.
    safe = ["--dtype", facts.get("type", "auto"), *(shlex.split(vllm_flags(VLLM_ON_CPUS)) if _on_cpus(python) else ())]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), *safe, *place]


def vllm_flags(settings: Mapping[str, Any]) -> str:
    """Keyword arguments of vLLM's `LLM` as options of its server."""
    texts = []
    for key, value in settings.items():
        texts.append("--" + key.replace("_", "-"))
        if value is not True:
            texts.append(shlex.quote(value if isinstance(value, str) else json.dumps(value)))
    return " ".join(texts)


def _on_cpus(python: str) -> bool:
    """Whether an environment's vLLM is a build for CPUs, which vLLM too knows by its name or version."""
    code = (
        "from importlib.metadata import distributions; "
        "print(any('vllm' in d.name and 'cpu' in d.name + d.version for d in distributions()))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() == "True"
