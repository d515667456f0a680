"""Where the weights are: one data record per Hugging Face model family, and what it says about a config."""

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from kvfold.attention import GroupedSpec
from kvfold.errors import UnsupportedModelError

Bias = bool | str  # a constant, or the config attribute that says so


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names, biases and windows of one family's attention.

    `window` tells which layers slide: none, all, or those that `config.layer_types` calls `sliding_attention`.
    """

    model_type: str
    query_bias: Bias = False
    key_bias: Bias = False
    value_bias: Bias = False
    output_bias: Bias = False
    window: Literal["none", "all", "by_layer"] = "none"
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    rotary: str = "model.rotary_emb"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"

    def prefix(self, layer: int) -> str:
        """Prefix of a layer's attention tensors."""
        return f"{self.layers}.{layer}.{self.attention}."

    def layer_specs(self, config: PreTrainedConfig) -> tuple[GroupedSpec, ...]:
        """The attention of each layer as the checkpoint has it."""
        heads = config.num_attention_heads
        spec = GroupedSpec(
            hidden_size=config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            query_bias=_bias(self.query_bias, config),
            key_bias=_bias(self.key_bias, config),
            value_bias=_bias(self.value_bias, config),
            output_bias=_bias(self.output_bias, config),
        )
        return (spec,) * config.num_hidden_layers

    def sliding_windows(self, config: PreTrainedConfig) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens; None where a query sees everything."""
        layers = config.num_hidden_layers
        if self.window == "none":
            return (None,) * layers
        if self.window == "all":
            return (config.sliding_window,) * layers
        return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)


def _bias(value: Bias, config: PreTrainedConfig) -> bool:
    return getattr(config, value) if isinstance(value, str) else value


def head_dim(config: PreTrainedConfig) -> int:
    """Width of one head: explicit where the config has it, else model width over heads."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


FAMILIES: dict[str, Family] = {
    "llama": Family(
        model_type="llama",
        query_bias="attention_bias",
        key_bias="attention_bias",
        value_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "mistral": Family(model_type="mistral", window="all"),
    "qwen2": Family(model_type="qwen2", query_bias=True, key_bias=True, value_bias=True, window="by_layer"),
}

# What stops a well-known family; anything else is judged by its config.
MISSING_FEATURES: dict[str, str] = {
    "cohere": "QK-norm and interleaved rotary pairs",
    "deepseek_v2": "its attention is latent already",
    "deepseek_v3": "its attention is latent already",
    "falcon": "a fused query/key/value projection",
    "gemma": "a scaled embedding",
    "gemma2": "soft-capped attention scores",
    "gemma3_text": "QK-norm and two rotary bases",
    "gpt2": "no rotary positions (its positions are learned embeddings)",
    "gpt_neox": "partial rotary heads and a fused query/key/value projection",
    "kvfold": "its attention is kvfold's, converted or trained so; convert an original instead",
    "mixtral": "no family record yet (its experts need none, its tests do)",
    "olmo2": "QK-norm",
    "opt": "no rotary positions (its positions are learned embeddings)",
    "phi": "partial rotary heads",
    "phi3": "a fused query/key/value projection",
    "qwen3": "QK-norm",
    "qwen3_moe": "QK-norm",
}


def family_of(config: PreTrainedConfig) -> Family:
    """The record of the family that `config` belongs to.

    Raises:
        UnsupportedModelError: the model cannot be converted; the message names the missing feature.
    """
    model_type = config.model_type
    reason = _obstacle(config)
    if reason is None:
        return FAMILIES[model_type]
    raise UnsupportedModelError(
        f"model type {model_type!r} cannot be converted: {reason}. Families: {', '.join(FAMILIES)}."
    )


def _obstacle(config: PreTrainedConfig) -> str | None:
    model_type = config.model_type
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if model_type in MISSING_FEATURES:
        return MISSING_FEATURES[model_type]
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return "no rotary positions in its config"
    if model_type not in FAMILIES:
        return "no family record (CONTRIBUTING.md says how to add one)"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial rotary heads (partial_rotary_factor={rope['partial_rotary_factor']})"
    if head_dim(config) % 2:
        return f"an odd head dim ({head_dim(config)})"
    if config.num_hidden_layers < 1:
        return f"it has {config.num_hidden_layers} layers"
    if config.num_key_value_heads < 1 or config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_key_value_heads} KV heads do not divide {config.num_attention_heads} query heads"
    return None


def check_tensors(family: Family, names: tuple[str, ...]) -> None:
    """Refuse a checkpoint whose attention has tensors that the family record knows nothing of.

    Raises:
        UnsupportedModelError: naming the tensor, and the feature where it is a known one (QK-norm).
    """
    known = (family.query, family.key, family.value, family.output, "rotary_emb")
    marker = f".{family.attention}."
    for name in names:
        if marker not in name:
            continue
        part = name.split(marker, 1)[1]
        if part.split(".")[0] in known:
            continue
        feature = "QK-norm" if part.startswith(("q_norm", "k_norm")) else "an attention tensor that its family lacks"
        raise UnsupportedModelError(f"model type {family.model_type!r} cannot be converted: {feature} ({name}).")
