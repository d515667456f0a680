"""What each runtime accepts of DeepSeek's latent attention: one record of constraints each."""

from dataclasses import dataclass


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
        gguf: whether it loads one GGUF file; the others load a folder.
    """

    name: str
    latent_norm_eps: float | None
    widths: tuple[tuple[int, int], ...]
    tied: bool
    biases: bool
    source: str
    gguf: bool = False


RUNTIMES: dict[str, Runtime] = {
    "transformers": Runtime(
        name="transformers",
        latent_norm_eps=1e-6,
        widths=(),
        tied=True,
        biases=True,
        source="transformers 5.24, models/deepseek_v3/modeling_deepseek_v3.py",
    ),
    "llamacpp": Runtime(
        name="llama.cpp",
        latent_norm_eps=None,
        widths=(),
        tied=True,
        biases=False,
        source="llama.cpp's deepseek2 in xllamacpp 2026.10.11549",
        gguf=True,
    ),
    "vllm": Runtime(
        name="vLLM",
        latent_norm_eps=None,
        widths=((512, 64),),
        tied=False,
        biases=False,
        source="vLLM 0.32 on CPUs: the decode kernel is compiled for 576 elements, and DeepSeek's class has no ties",
    ),
    "sglang": Runtime(
        name="SGLang",
        latent_norm_eps=None,
        widths=(),
        tied=True,
        biases=False,
        source="SGLang 0.5.23, read in its source, not run",
    ),
}
