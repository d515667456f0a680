"""A latent model as a dense DeepSeek-V3, which stock runtimes load without code of ours."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import DeepseekV3Config, PreTrainedConfig

from kvfold.attention import LatentSpec
from kvfold.checkpoint import Checkpoint, OutputFolder, open_checkpoint, write_json, write_text
from kvfold.errors import OptionError
from kvfold.export.layer import Widths, deepseek_layer
from kvfold.export.runtimes import RUNTIMES, Runtime
from kvfold.families import family_of, head_dim
from kvfold.modeling import KvfoldConfig
from kvfold.progress import Progress, silent
from kvfold.registry import lookup

INPUT_NORM = "input_layernorm"
"""In a layer of every family that can be converted."""
LARGEST_THETA = 1e30
"""Runtimes compute frequencies in fp32."""
EXPORT_FILE = "kvfold-export.json"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A finished export; elements are those that the runtime caches per token and layer."""

    out: Path
    source: str
    runtime: str
    cached_elements: int
    source_elements: int
    padded: bool
    rope_theta: float
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out)}


def export(
    model: str | Path,
    out: str | Path,
    *,
    runtime: str = "transformers",
    overwrite: bool = False,
    progress: Progress = silent,
) -> Export:
    """Write a latent model as `DeepseekV3ForCausalLM` for a runtime, layer by layer.

    Args:
        model: folder of a converted (or trained) model with one latent and one rotary head per layer.
        out: folder to write; whole or not there at all.
        runtime: a name of `RUNTIMES`.
        overwrite: replace an existing `out`.
        progress: called as `Progress` says.

    Raises:
        OptionError: the model has something that the runtime cannot express; the message says what.
        KvfoldError: the model or the output does not work.
    """
    target = lookup(RUNTIMES, runtime, "runtime")
    checkpoint = open_checkpoint(model)
    specs = _check(checkpoint, target)
    widths = _widths(specs, target)
    with OutputFolder(Path(out), source=checkpoint.path, overwrite=overwrite) as folder:
        theta = _theta(checkpoint, widths)
        config = deepseek_config(checkpoint, specs[0], widths, target, theta)
        tokenizer = checkpoint.load_tokenizer()
        _write_weights(checkpoint, specs, widths, config, target, folder, progress)
        config.save_pretrained(folder.path)
        tokenizer.save_pretrained(folder.path)
        if checkpoint.generation_config is not None:
            checkpoint.generation_config.save_pretrained(folder.path)
        finished = Export(
            out=Path(out),
            source=str(model),
            runtime=runtime,
            cached_elements=widths.kv_lora_rank + widths.qk_rope_head_dim,
            source_elements=specs[0].cached_elements(),
            padded=widths != Widths(kv_lora_rank=specs[0].kv_lora_rank, qk_rope_head_dim=specs[0].qk_rope_head_dim),
            rope_theta=theta,
            dtype=str(checkpoint.dtype).removeprefix("torch."),
        )
        write_json(folder.path / EXPORT_FILE, finished.to_dict())
        write_text(folder.path / "README.md", _card(finished, target))
    return finished


def deepseek_config(
    checkpoint: Checkpoint, spec: LatentSpec, widths: Widths, runtime: Runtime, theta: float
) -> DeepseekV3Config:
    """The config; every layer is dense."""
    base = _base(checkpoint)
    tied = base.tie_word_embeddings and runtime.tied
    config = DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=base.intermediate_size,
        num_hidden_layers=base.num_hidden_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_attention_heads,
        kv_lora_rank=widths.kv_lora_rank,
        q_lora_rank=spec.q_lora_rank,
        qk_rope_head_dim=widths.qk_rope_head_dim,
        qk_nope_head_dim=spec.qk_nope_head_dim,
        v_head_dim=spec.v_head_dim,
        first_k_dense_replace=base.num_hidden_layers,
        num_mtp_layers=0,
        hidden_act=base.hidden_act,
        max_position_embeddings=base.max_position_embeddings,
        rms_norm_eps=base.rms_norm_eps,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        rope_interleave=True,
        attention_bias=_has_biases(spec),
        bos_token_id=base.bos_token_id,
        eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id,
    )
    config.dtype = checkpoint.dtype
    return config


def _check(checkpoint: Checkpoint, runtime: Runtime) -> list[LatentSpec]:
    """The specs of all layers, if the runtime can express them."""
    config = checkpoint.config
    if not isinstance(config, KvfoldConfig):
        raise OptionError(f"{checkpoint.path} is not converted: only latent models can be exported; convert it first.")
    specs: list[LatentSpec] = []
    for index, spec in enumerate(config.specs()):
        if problem := _problem(spec, runtime):
            raise OptionError(f"layer {index} {problem}, which {runtime.name} cannot express.")
        assert isinstance(spec, LatentSpec)
        specs.append(spec)
    if any(spec != specs[0] for spec in specs):
        raise OptionError(
            "the layers differ in their ranks, of which a DeepSeek config has one: convert without per_layer."
        )
    base = config.base
    if any(window is not None for window in config.windows()):
        raise OptionError(f"the model has sliding windows, which {runtime.name} cannot express.")
    if getattr(base, "mlp_bias", False) or base.hidden_act != "silu":
        raise OptionError(
            f"the model's MLPs have biases or another activation than silu; {runtime.name} knows neither."
        )
    kind = base.rope_parameters.get("rope_type", "default")
    if kind != "default":
        raise OptionError(f"the model's rotary type is {kind!r}; only unscaled frequencies can be exported so far.")
    return specs


def _problem(spec: Any, runtime: Runtime) -> str | None:
    """What of a layer has no place in DeepSeek's attention."""
    if not isinstance(spec, LatentSpec):
        return f"has {spec.name}"
    eps = runtime.latent_norm_eps
    checks = {
        f"has {spec.rotary_heads} rotary heads": spec.rotary_heads > 1,
        f"has {spec.latent_heads} latent heads": spec.latent_heads > 1 or spec.q_latent_heads > 1,
        "has biases of queries": spec.query_bias,
        "has no dims without rotation": not spec.qk_nope_head_dim,
        "has biases": _has_biases(spec) and not runtime.biases,
        "has biases beside a query latent": _has_biases(spec) and spec.q_lora_rank is not None,
        f"has norms with eps {spec.norm_eps:g}": spec.latent_norm and eps is not None and spec.norm_eps != eps,
    }
    return next((problem for problem, there in checks.items() if there), None)


def _has_biases(spec: LatentSpec) -> bool:
    return any((spec.latent_bias, spec.rope_key_bias, spec.value_bias, spec.output_bias))


def _widths(specs: list[LatentSpec], runtime: Runtime) -> Widths:
    """Those of the model, or the smallest allowed ones that hold them."""
    spec = specs[0]
    own = (spec.kv_lora_rank, spec.qk_rope_head_dim)
    fitting = [(rank, rope) for rank, rope in runtime.widths or (own,) if rank >= own[0] and rope >= own[1]]
    if not fitting:
        most = " or ".join(f"{rank} + {rope}" for rank, rope in runtime.widths)
        raise OptionError(f"a latent of {own[0]} and {own[1]} rotary dims are more than {runtime.name} takes, {most}.")
    rank, rope = min(fitting, key=sum)
    return Widths(kv_lora_rank=rank, qk_rope_head_dim=rope)


def _theta(checkpoint: Checkpoint, widths: Widths) -> float:
    """The base with which the runtime's first frequencies are those that the model kept.

    The model has the frequencies `theta^(-2 l / d)`, l = 0, s, 2s, ...; the runtime `theta'^(-2 k / d_r')`.
    """
    base = _base(checkpoint)
    family = family_of(base)
    kept = {
        tuple(checkpoint.read(f"{family.layers}.{layer}.{family.attention}.rotary_index").flatten().tolist())
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
        raise OptionError(
            f"the export would need the rotary base {theta:.0e}, too large for fp32: keep more frequencies."
        )
    return theta


def _write_weights(
    checkpoint: Checkpoint,
    specs: list[LatentSpec],
    widths: Widths,
    config: DeepseekV3Config,
    runtime: Runtime,
    folder: OutputFolder,
    progress: Progress,
) -> None:
    base = _base(checkpoint)
    family = family_of(base)
    eps = runtime.latent_norm_eps or base.rms_norm_eps
    for layer, spec in enumerate(specs):
        place = f"{family.layers}.{layer}"
        names = [name for name in checkpoint.names() if name.startswith(f"{place}.{family.attention}.")]
        tensors = {name.removeprefix(f"{place}.{family.attention}."): checkpoint.read(name) for name in names}
        norm = checkpoint.read(f"{place}.{INPUT_NORM}.weight")
        for name, tensor in deepseek_layer(tensors, spec, widths, norm, eps).items():
            folder.add(f"{place}.self_attn.{name}", tensor.to(checkpoint.dtype))
        progress("exporting layers", layer + 1, len(specs))
    attention = f".{family.attention}."
    for name in checkpoint.names():
        if attention not in name:
            folder.add(name, checkpoint.read(name).to(checkpoint.dtype))
    if base.tie_word_embeddings and not config.tie_word_embeddings:
        folder.add("lm_head.weight", checkpoint.read("model.embed_tokens.weight").to(checkpoint.dtype).clone())


def _base(checkpoint: Checkpoint) -> PreTrainedConfig:
    assert isinstance(checkpoint.config, KvfoldConfig)
    return checkpoint.config.base


def _card(finished: Export, runtime: Runtime) -> str:
    padded = " (padded with zeros to a width that the runtime takes)" if finished.padded else ""
    return f"""---
library_name: transformers
tags: [kvfold, mla, deepseek_v3]
---

# {Path(finished.source).name} for {runtime.name}

A dense `DeepseekV3ForCausalLM`, made by `kvfold export` from a conversion to multi-head latent attention. It loads in
{runtime.name} without custom code and caches {finished.cached_elements} elements per token and layer{padded}.
"""
