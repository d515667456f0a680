"""Running an export in a runtime, in a process of its own.

Every runtime has a script `probes/run_NAME.py`, which must not import kvfold: the runtime may be in another
environment, and the export has to work without us. Its arguments are two JSON files, the request and the answer that it
writes.

Request: `export` is the path, `prompt` token ids, `following` those that come next in the text, `places` positions of
the prompt, `decoded` how many steps to decode, `top` how many log-probabilities to give at each position, `text` what
to tokenise, `cells` tokens that the cache must hold, `settings` those of `Settings`.

Answer: `version` of the runtime, `sequence` the token ids it had seen at last, `prefill` and `decode` by position the
log-probabilities of the likeliest tokens behind it (JSON object, token: nats), `cached_elements` per token and layer as
the runtime tells, `token_ids` of the text.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvfold.export import VLLM_ON_CPUS, vllm_flags

TIMEOUT = 3600
TELLING = ("Error", "error", "assert", "do not fit")
"""Words by which the line of a log that says what is wrong is known."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One way to run a runtime.

    Args:
        name: how a user asks for it.
        options: what the probe is told.
        tolerance: how much log-probabilities may differ, in nats, where weights are in fp32.
        advised: whether a user should take it; others are run to show what they do.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-3
    advised: bool = True


DEFAULT_OPERATORS = {key: value for key, value in VLLM_ON_CPUS.items() if key != "compilation_config"}

PROBES: dict[str, tuple[Settings, ...]] = {
    "transformers": (Settings(name="defaults"),),
    "llamacpp": (
        Settings(name="-fa off -ctk f32 -ctv f32", options={"cache": "f32", "flash_attention": False}),
        # The cache and flash attention are in fp16.
        Settings(name="defaults", tolerance=5e-2),
    ),
    "vllm": (
        Settings(name=vllm_flags(VLLM_ON_CPUS), options=VLLM_ON_CPUS),
        # vLLM's own rotary operator is wrong for latents on CPUs.
        Settings(name=vllm_flags(DEFAULT_OPERATORS), options=DEFAULT_OPERATORS, advised=False),
    ),
}
"""The ways to run each runtime that has a script."""


def run_probe(runtime: str, request: Mapping[str, Any], python: str = sys.executable) -> dict[str, Any] | str:
    """The answer, or in one line why there is none."""
    script = Path(str(files("kvfold.doctor"))) / "probes" / f"run_{runtime}.py"
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place, "request.json"), Path(place, "answer.json")
        asked.write_text(json.dumps(request))
        command = [python, str(script), str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        if answered.exists():
            return json.loads(answered.read_text())
        log = answered.with_suffix(".log")
        told = done.stderr + (log.read_text(errors="replace") if log.exists() else "")
    return _reason(told) or f"ended with code {done.returncode}"


def _reason(log: str) -> str:
    """The last line that tells an error, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in TELLING)]
    return re.sub(r"^(\[\w+\]:|\W)+", "", (telling or lines or [""])[-1])
