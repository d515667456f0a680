"""A decoder to be trained from scratch: Llama with one of kvfold's attentions, in a few numbers."""

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import torch
from transformers import LlamaConfig

from kvfold.attention import AttentionSpec, GroupedSpec, LatentSpec, TiedSpec
from kvfold.errors import OptionError
from kvfold.modeling import KvfoldConfig, KvfoldForCausalLM
from kvfold.option_types import check_types
from kvfold.registry import lookup

GROUPS = ("num_key_value_heads",)
LATENT = ("kv_lora_rank", "qk_rope_head_dim", "q_lora_rank", "biases", "latent_norm", "scaled_latents")
LATENT_BIASES = ("query_bias", "latent_bias", "rope_key_bias", "value_bias", "output_bias")
MLRA_BLOCKS = 4
LARGEST = 10**7
"""Of every number of a shape."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The shape of a decoder and how its weights begin.

    Args:
        attention: `mha`, `mqa`, `gqa`, `gta`, `mla`, `gla`, `glaq` (a split query latent, too) or `mlra`.
        hidden_size, num_hidden_layers, num_attention_heads, head_dim, intermediate_size, vocab_size,
            max_position_embeddings, rope_theta: as in transformers' LlamaConfig.
        tie_word_embeddings: one matrix for both ends.
        num_key_value_heads: of `gqa` and `gta`.
        kv_lora_rank: cached latent elements, all latent heads together (default: 4 head dims).
        latent_heads: of `gla` and `glaq` (default: 2).
        branches: of `mlra`, 2 or 4 over its four latents (default: 4).
        q_lora_rank: of the query latent; None makes queries out of the hidden state.
        qk_rope_head_dim: rotary dims of latent variants, beside head_dim dims without rotation (default: head_dim / 2).
        biases: the published latent models of arXiv 2505.21487 have biases; those of arXiv 2603.02188 have none.
        latent_norm: RMSNorm of each latent head.
        scaled_latents: let these norms begin with the weights (D / rank)^1/2, as arXiv 2603.02188 scales them; the KV
            latent's rank is that of one head.
        init_std: of all weights but the norms'.
        zero_outputs: let what is added to the residual stream (output and down projections) begin at zero.
    """

    attention: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = True
    num_key_value_heads: int | None = None
    kv_lora_rank: int | None = None
    latent_heads: int | None = None
    branches: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    biases: bool = False
    latent_norm: bool = True
    scaled_latents: bool = False
    init_std: float = 0.02
    zero_outputs: bool = False

    def __post_init__(self) -> None:
        """Refuse a shape that cannot be built, or a number that the variant has no use for."""
        check_types(self)
        variant = lookup(VARIANTS, self.attention, "attention")
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise OptionError(f"{field.name} must be 1 or more, got {value}.")
            if type(value) is int and value > LARGEST and field.name != "rope_theta":
                raise OptionError(f"{field.name} must be {LARGEST:,} or less, got {value:,}.")
            if value != field.default and not has_use(self.attention, field.name):
                raise OptionError(f"{self.attention} attention has no {field.name}, got {value!r}: leave it out.")
        for name in variant.required:
            if getattr(self, name) is None:
                raise OptionError(f"{self.attention} attention needs {name}: give it.")
        for name, most in (("init_std", 1), ("rope_theta", 1e30)):
            if not 0 < getattr(self, name) <= most:
                raise OptionError(f"{name} must be a number above 0 and up to {most:g}, got {getattr(self, name)}.")
        if self.head_dim % 2:
            raise OptionError(f"head_dim must be even for rotary pairs, got {self.head_dim}.")
        pairs = self.spec().rotary_pairs[1]
        if (self.head_dim // 2) % pairs:
            raise OptionError(
                f"qk_rope_head_dim {2 * pairs} must divide head_dim {self.head_dim}, whose frequencies it shares."
            )
        if self.hidden_size % self.num_attention_heads:
            raise OptionError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} for "
                f"{self.num_attention_heads} heads: transformers' Llama asks for it."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Architecture":
        """From recipe keys; an unknown key is an error that suggests the nearest, as is a missing one."""
        known = {field.name: field for field in fields(cls)}
        for key in values:
            lookup(known, key, "option of a model")
        missing = [name for name, field in known.items() if name not in values and field.default is MISSING]
        if missing:
            raise OptionError(f"the model lacks {', '.join(missing)}: give a number for each.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def spec(self) -> AttentionSpec:
        """The attention of every layer."""
        return VARIANTS[self.attention].spec(self)

    def config(self) -> KvfoldConfig:
        base = LlamaConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=self.tie_word_embeddings,
            initializer_range=self.init_std,
        )
        return KvfoldConfig(text_config=base.to_dict(), attention=self.spec().to_dict())

    def parameters(self) -> int:
        """Trainable parameters of the whole model, counted from the spec: embeddings, attention, SwiGLU, norms."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layer = self.spec().parameters() + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return embeddings + self.num_hidden_layers * layer + self.hidden_size

    def flops_per_token(self, context: int) -> int:
        """Of one forward pass, a token in the mean, over `context` tokens; two per multiply-add, causal half."""
        spec = self.spec()
        attention = spec.projection_flops(context) + spec.expansion_flops(context)
        attention += spec.attention_flops(context, context) // 2
        feed_forward = 2 * 3 * self.hidden_size * self.intermediate_size
        head = 2 * self.hidden_size * self.vocab_size
        return self.num_hidden_layers * (attention // context + feed_forward) + head

    def on_meta(self) -> KvfoldForCausalLM:
        """The model without memory for its weights."""
        with torch.device("meta"):
            return KvfoldForCausalLM(self.config())


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a kind of attention is made of an architecture; `options` are those that it has a use for."""

    spec: Callable[[Architecture], AttentionSpec]
    options: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


def _grouped(shape: Architecture, kv_heads: int | None) -> GroupedSpec:
    assert kv_heads is not None
    return GroupedSpec(**_common(shape), num_key_value_heads=kv_heads, head_dim=shape.head_dim)


def _tied(shape: Architecture) -> TiedSpec:
    assert shape.num_key_value_heads is not None
    return TiedSpec(**_common(shape), num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim)


def _latent(shape: Architecture, latent_heads: int = 1, *, split_query: bool = False, branches: int = 1) -> LatentSpec:
    return LatentSpec(
        **_common(shape),
        num_key_value_heads=shape.num_attention_heads,
        kv_lora_rank=4 * shape.head_dim if shape.kv_lora_rank is None else shape.kv_lora_rank,
        latent_heads=latent_heads,
        branches=branches,
        q_lora_rank=shape.q_lora_rank,
        q_latent_heads=latent_heads if split_query else 1,
        qk_rope_head_dim=shape.head_dim // 2 if shape.qk_rope_head_dim is None else shape.qk_rope_head_dim,
        qk_nope_head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        latent_norm=shape.latent_norm,
        **dict.fromkeys(LATENT_BIASES, shape.biases),
    )


def _common(shape: Architecture) -> dict[str, Any]:
    return {"hidden_size": shape.hidden_size, "num_attention_heads": shape.num_attention_heads}


GLA = (*LATENT, "latent_heads")
VARIANTS: dict[str, Variant] = {
    "mha": Variant(spec=lambda shape: _grouped(shape, shape.num_attention_heads)),
    "mqa": Variant(spec=lambda shape: _grouped(shape, 1)),
    "gqa": Variant(spec=lambda shape: _grouped(shape, shape.num_key_value_heads), options=GROUPS, required=GROUPS),
    "gta": Variant(spec=_tied, options=GROUPS, required=GROUPS),
    "mla": Variant(spec=_latent, options=LATENT),
    "gla": Variant(spec=lambda shape: _latent(shape, shape.latent_heads or 2), options=GLA),
    "glaq": Variant(
        spec=lambda shape: _latent(shape, shape.latent_heads or 2, split_query=True),
        options=GLA,
        required=("q_lora_rank",),
    ),
    "mlra": Variant(
        spec=lambda shape: _latent(shape, MLRA_BLOCKS, branches=shape.branches or MLRA_BLOCKS),
        options=(*LATENT, "branches"),
    ),
}
OWN = {name for variant in VARIANTS.values() for name in variant.options}


def has_use(attention: str, option: str) -> bool:
    """Whether a kind of attention has a use for an option of `Architecture`; what is no kind is not judged."""
    return attention not in VARIANTS or option not in OWN or option in VARIANTS[attention].options
