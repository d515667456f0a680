"""A latent model as a runtime wants it: checked against the runtime's constraints, and its tensors as DeepSeek's."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvfold.attention import LatentSpec
from kvfold.checkpoint import Checkpoint, open_checkpoint
from kvfold.convert import CONVERSION_FILE, check_deepseek
from kvfold.errors import CheckpointError, OptionError
from kvfold.export.layer import Widths, deepseek_layer
from kvfold.export.runtimes import Runtime
from kvfold.families import family_of, head_dim
from kvfold.modeling import KvfoldConfig
from kvfold.progress import Progress

LARGEST_THETA = 1e30
"""Runtimes compute frequencies in fp32."""
INPUT_NORM = "input_layernorm"
"""In a layer of every family that can be converted."""


@dataclass(frozen=True, kw_only=True)
class LatentModel:
    """What an export is made of; `theta` is the base of the runtime's frequencies, `tied` whether its ends are.

    `path` is the model that the user named, `checkpoint` where its weights are read.
    """

    path: Path
    checkpoint: Checkpoint
    base: PreTrainedConfig
    spec: LatentSpec
    widths: Widths
    runtime: Runtime
    theta: float
    tied: bool

    @property
    def padded(self) -> bool:
        return self.cached_elements != self.spec.cached_elements()

    @property
    def cached_elements(self) -> int:
        """What the runtime caches per token and layer."""
        return self.widths.kv_lora_rank + self.widths.qk_rope_head_dim

    @property
    def has_biases(self) -> bool:
        return _has_biases(self.spec)

    def tensors(self, dtype: torch.dtype, progress: Progress) -> Iterator[tuple[str, Tensor]]:
        """Names as in `DeepseekV3ForCausalLM` and tensors, layer by layer."""
        family = family_of(self.base)
        eps = self.runtime.latent_norm_eps or self.base.rms_norm_eps
        for layer in range(self.base.num_hidden_layers):
            place = f"{family.layers}.{layer}"
            prefix = f"{place}.{family.attention}."
            names = [name for name in self.checkpoint.names() if name.startswith(prefix)]
            tensors = {name.removeprefix(prefix): self.checkpoint.read(name) for name in names}
            norm = self.checkpoint.read(f"{place}.{INPUT_NORM}.weight")
            for name, tensor in deepseek_layer(tensors, self.spec, self.widths, norm, eps).items():
                yield f"{place}.self_attn.{name}", tensor.to(dtype)
            progress("exporting layers", layer + 1, self.base.num_hidden_layers)
        for name in self.checkpoint.names():
            if f".{family.attention}." not in name:
                yield name, self.checkpoint.read(name).to(dtype)
        if self.base.tie_word_embeddings and not self.tied:
            yield f"{family.head}.weight", self.checkpoint.read(f"{family.embedding}.weight").to(dtype).clone()


def open_converted(model: str | Path) -> tuple[Checkpoint, KvfoldConfig]:
    """A latent model and its config.

    Raises:
        OptionError: it is not one.
        CheckpointError: it cannot be opened.
    """
    checkpoint = open_checkpoint(model)
    if not isinstance(checkpoint.config, KvfoldConfig):
        raise OptionError(f"{checkpoint.path} is not converted: only latent models can be exported; convert it first.")
    return checkpoint, checkpoint.config


def latent_model(model: str | Path, runtime: Runtime, *, folded: Path | None = None) -> LatentModel:
    """Open a model for a runtime, `folded` if that is its copy with other weights.

    Raises:
        OptionError: it has something that the runtime cannot express; the message says what.
        CheckpointError: it cannot be opened.
    """
    checkpoint, config = open_converted(folded or model)
    path = open_checkpoint(model).path
    spec = _spec(config, runtime)
    check_deepseek(config.base, config.windows())
    widths = _widths(spec, runtime)
    return LatentModel(
        path=path,
        checkpoint=checkpoint,
        base=config.base,
        spec=spec,
        widths=widths,
        runtime=runtime,
        theta=_theta(checkpoint, config.base, widths),
        tied=config.base.tie_word_embeddings and runtime.tied,
    )


def original_elements(folder: Path) -> int | None:
    """What the original of a conversion cached per token and layer; None for a model that was trained with latents.

    Raises:
        CheckpointError: the conversion's own account is damaged.
    """
    file = folder / CONVERSION_FILE
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text("utf-8"))["plan"]["layers"][0]["elements_before"]
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: convert once more, or remove it.") from error


def _spec(config: KvfoldConfig, runtime: Runtime) -> LatentSpec:
    """That of every layer."""
    specs = config.specs()
    for index, spec in enumerate(specs):
        if problem := _problem(spec, runtime.latent_norm_eps or config.base.rms_norm_eps, runtime):
            raise OptionError(f"layer {index} {problem}, which {runtime.name} cannot express{_way_out(spec, runtime)}.")
    if any(spec != specs[0] for spec in specs):
        raise OptionError(
            "the layers differ in their ranks, of which a DeepSeek config has one: convert without per_layer."
        )
    assert isinstance(specs[0], LatentSpec)
    return specs[0]


def _problem(spec: Any, eps: float, runtime: Runtime) -> str | None:
    """What of a layer has no place in DeepSeek's attention; `eps` is that of the runtime's norms of latents."""
    if not isinstance(spec, LatentSpec):
        return f"has {spec.name}"
    norms = spec.latent_norm or spec.q_lora_rank is not None
    checks = {
        f"has {spec.rotary_heads} rotary heads": spec.rotary_heads > 1,
        f"has {spec.latent_heads} latent heads": spec.latent_heads > 1 or spec.q_latent_heads > 1,
        "has biases of queries": spec.query_bias,
        "has no dims without rotation": not spec.qk_nope_head_dim,
        "has biases": _has_biases(spec) and not runtime.biases,
        "has biases beside a query latent": _has_biases(spec) and spec.q_lora_rank is not None,
        f"has norms of latents with eps {spec.norm_eps:g} and not {eps:g}": norms and spec.norm_eps != eps,
    }
    return next((problem for problem, there in checks.items() if there), None)


def _way_out(spec: Any, runtime: Runtime) -> str:
    """What may be done about the biases of a conversion."""
    biased = isinstance(spec, LatentSpec) and (spec.query_bias or (_has_biases(spec) and not runtime.biases))
    biased = biased and (runtime.biases or not spec.output_bias)  # which is behind the attention
    return "; --approximate folds biases into the weights, and tells the loss" if biased else ""


def _has_biases(spec: LatentSpec) -> bool:
    return any((spec.latent_bias, spec.rope_key_bias, spec.value_bias, spec.output_bias))


def _widths(spec: LatentSpec, runtime: Runtime) -> Widths:
    """Those of the model, or the smallest allowed ones that hold them."""
    fitting = runtime.fitting(spec.kv_lora_rank, spec.qk_rope_head_dim)
    if fitting is None:
        most = " or ".join(f"{rank} + {rope}" for rank, rope in runtime.widths)
        raise OptionError(
            f"a latent of {spec.kv_lora_rank} and {spec.qk_rope_head_dim} rotary dims are more than {runtime.name} "
            f"takes, {most}."
        )
    return Widths(kv_lora_rank=fitting[0], qk_rope_head_dim=fitting[1])


def _theta(checkpoint: Checkpoint, base: Any, widths: Widths) -> float:
    """The base with which the runtime's first frequencies are those that the model kept.

    The model has the frequencies `theta^(-2 l / d)`, l = 0, s, 2s, ...; the runtime `theta'^(-2 k / d_r')`.
    """
    family = family_of(base)
    kept = {
        tuple(torch.as_tensor(checkpoint.read(f"{family.prefix(layer)}rotary_index")).flatten().tolist())
        for layer in range(base.num_hidden_layers)
    }
    index = next(iter(kept))
    step = index[1] - index[0] if len(index) > 1 else 1
    if len(kept) > 1 or step < 1 or index != tuple(range(0, step * len(index), step)):
        raise OptionError(
            "the frequencies that were kept are no series 0, s, 2s, ... alike in all layers: convert with --target "
            "deepseek."
        )
    theta = float(base.rope_parameters["rope_theta"]) ** (step * widths.qk_rope_head_dim / head_dim(base))
    if theta > LARGEST_THETA:
        raise OptionError(f"the export would need the rotary base {theta:.0e}, too large for fp32: keep more dims.")
    return theta
