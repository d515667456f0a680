"""What each runtime accepts of DeepSeek's latent attention, one record of constraints each, and whether it is here."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold.errors import OptionError
from kvfold.registry import lookup


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Constraints of a runtime on a dense `DeepseekV3ForCausalLM`.

    Args:
        name: what a user calls it.
        latent_norm_eps: eps of the RMSNorm on the latent where that is fixed; None where it is `rms_norm_eps`.
        widths: allowed (latent, rotary) widths, to the smallest of which that holds it a conversion is padded with
            zeros; empty allows all.
        tied: whether one matrix for both ends is honoured.
        biases: whether biases of the down and output projections are.
        source: where this is known from.
        module: what it is imported as.
        install: how to get it.
        gguf: whether it loads one GGUF file; the others load a folder.
        step: on CPUs it is fast where the latent's width and the sum of both are multiples of this.
    """

    name: str
    latent_norm_eps: float | None
    widths: tuple[tuple[int, int], ...]
    tied: bool
    biases: bool
    source: str
    module: str
    install: str
    gguf: bool = False
    step: int = 1

    def fitting(self, kv_lora_rank: int, qk_rope_head_dim: int) -> tuple[int, int] | None:
        """The smallest allowed widths that hold these; None if they are too wide."""
        own = (kv_lora_rank, qk_rope_head_dim)
        holding = [widths for widths in self.widths or (own,) if all(a >= b for a, b in zip(widths, own, strict=True))]
        return min(holding, key=sum, default=None)


RUNTIMES: dict[str, Runtime] = {
    "transformers": Runtime(
        name="transformers",
        latent_norm_eps=1e-6,
        widths=(),
        tied=True,
        biases=True,
        source="transformers 5.24, models/deepseek_v3/modeling_deepseek_v3.py",
        module="transformers",
        install="pip install transformers",
    ),
    "llamacpp": Runtime(
        name="llama.cpp",
        latent_norm_eps=None,
        widths=(),
        tied=True,
        biases=False,
        source="llama.cpp's deepseek2 in xllamacpp 2026.10.11549",
        module="xllamacpp",
        install="pip install xllamacpp",
        gguf=True,
        # Measured where there is AVX-512: results/llamacpp_speed.json.
        step=64,
    ),
    "vllm": Runtime(
        name="vLLM",
        latent_norm_eps=None,
        widths=((512, 64),),
        tied=False,
        biases=False,
        source="vLLM 0.32 on CPUs: the decode kernel is compiled for 576 elements, and DeepSeek's class has no ties",
        module="vllm",
        install="see docs/runtimes.md",
    ),
    "sglang": Runtime(
        name="SGLang",
        latent_norm_eps=None,
        widths=(),
        tied=True,
        biases=False,
        source="SGLang 0.5.23, read in its source, not run",
        module="sglang",
        install="see docs/runtimes.md",
    ),
}


def runtime_of(path: Path, facts: Mapping[str, Any], asked: str | None = None) -> str:
    """The name of the runtime that is asked for, or that an export was made for; it loads such a thing.

    Args:
        facts: what `read_facts` read of the export.

    Raises:
        OptionError: it is not known, or loads files and not folders, or folders and not files.
    """
    name = asked or facts.get("runtime")
    if name is None:
        raise OptionError(f"{path} does not say what it was made for: name a runtime with --runtime.")
    runtime = lookup(RUNTIMES, name, "runtime")
    if runtime.gguf != path.is_file():
        raise OptionError(f"{runtime.name} loads {'.gguf files' if runtime.gguf else 'folders'}, got {path}.")
    return name


def check_installed(runtime: Runtime, python: str) -> None:
    """Look for it in the environment of an interpreter.

    Raises:
        OptionError: it is not there, or there is no such interpreter.
    """
    if not has_module(runtime.module, python):
        raise OptionError(
            f"{runtime.name} is not installed for {python} ({runtime.install}): install it, or name the interpreter "
            "of its environment with --python."
        )


def has_module(module: str, python: str) -> bool:
    """Whether the interpreter `python` finds `module`.

    Raises:
        OptionError: there is no such interpreter.
    """
    # Exit code 3 says no; others tell that this is no Python.
    code = "import importlib.util, sys; sys.exit(3 * (importlib.util.find_spec(sys.argv[1]) is None))"
    try:
        found = subprocess.run([python, "-c", code, module], capture_output=True).returncode
    except OSError as error:
        raise OptionError(
            f"cannot run {python!r}: {error.strerror}; name the interpreter of an environment."
        ) from error
    if found not in (0, 3):
        raise OptionError(f"{python!r} is no Python interpreter: name that of an environment.")
    return not found
