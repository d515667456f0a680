"""The table of variants that every contract test runs over: a new variant is one line here."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from kvfold import KvfoldConfig, KvfoldForCausalLM
from kvfold.attention import Attention, AttentionSpec, GroupedSpec, LatentSpec, LayerContext, TiedSpec, build_attention

BASE_PAIRS = 4
WIDTH = {"hidden_size": 18, "num_attention_heads": 6}


def grouped(heads: int, **changes) -> GroupedSpec:
    return GroupedSpec(**WIDTH, num_key_value_heads=heads, head_dim=8, **changes)


def tied(heads: int) -> TiedSpec:
    return TiedSpec(**WIDTH, num_key_value_heads=heads, head_dim=8)


def latent(heads: int = 6, **changes) -> LatentSpec:
    shape = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    return LatentSpec(**WIDTH, num_key_value_heads=heads, **(shape | changes))


BIASES = dict.fromkeys(("query_bias", "latent_bias", "rope_key_bias", "value_bias", "output_bias"), True)

VARIANTS: dict[str, AttentionSpec] = {
    "mha": grouped(6),
    "gqa": grouped(2),
    "gqa_biases": grouped(3, query_bias=True, key_bias=True, value_bias=True, output_bias=True),
    "mqa": grouped(1),
    "gta2": tied(2),
    "gta1": tied(1),
    "mla": latent(),
    "mla_everything": latent(q_lora_rank=10, latent_norm=True, **BIASES),
    "mla_per_head": latent(rotary_heads=6),
    "mla_of_gqa": latent(heads=2, rotary_heads=2, **BIASES),
    "mla_of_gqa_shared": latent(heads=3, v_head_dim=8),
    "mla_rotary_only": latent(heads=2, qk_rope_head_dim=16, qk_nope_head_dim=0, value_bias=True),
    "mla_odd": latent(kv_lora_rank=7, qk_rope_head_dim=2, qk_nope_head_dim=5, v_head_dim=3),
    "gla2": latent(latent_heads=2, latent_norm=True, value_bias=True),
    "gla2_of_gqa": latent(heads=2, latent_heads=2, rotary_heads=2),
    "gla2_split_query": latent(latent_heads=2, q_lora_rank=8, q_latent_heads=2, **BIASES),
    "mlra2": latent(latent_heads=4, branches=2, q_lora_rank=10, latent_norm=True),
    "mlra3": latent(latent_heads=3, branches=3, value_bias=True),
    "mlra2_of_gqa": latent(heads=2, latent_heads=2, branches=2, qk_nope_head_dim=0),
    "gla3_rotary_only": latent(latent_heads=3, qk_nope_head_dim=0),
}


@pytest.fixture(params=VARIANTS)
def spec(request) -> AttentionSpec:
    return VARIANTS[request.param]


@dataclass(frozen=True)
class Layer:
    """One attention module in fp64, with the hidden states and rotary phases of two sequences of eleven tokens."""

    module: Attention
    hidden: Tensor
    phase: Tensor

    def tables(self, tokens: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """`cos, sin` as a base model passes them in: both halves of a head alike."""
        phase = self.phase[:, tokens]
        return torch.cat((phase.real, phase.real), dim=-1), torch.cat((phase.imag, phase.imag), dim=-1)

    def output(self, mask: Tensor | None = None) -> Tensor:
        return self.module(self.hidden, self.tables(), mask)[0]


@pytest.fixture
def layer(spec, randomise) -> Layer:
    torch.manual_seed(1)
    context = LayerContext(config=LlamaConfig(num_hidden_layers=1), layer_idx=0, base_pairs=BASE_PAIRS)
    module = randomise(build_attention(spec, context).double())
    module.config._attn_implementation = "eager"
    module.rotary_index.random_(0, BASE_PAIRS)
    angles = torch.arange(11)[:, None] * 0.7 ** torch.arange(BASE_PAIRS) + torch.tensor([[[0.0]], [[3.0]]])
    phase = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    return Layer(module, torch.randn(2, 11, 18, dtype=torch.float64), phase)


@pytest.fixture
def model_of(randomise) -> Callable[..., KvfoldForCausalLM]:
    """A two-layer model with the given attention in both layers; keyword arguments change the base config."""

    def build(attention: AttentionSpec, model_type: str = "llama", **changes) -> KvfoldForCausalLM:
        sizes = {"vocab_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 2 * BASE_PAIRS}
        special = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
        base = AutoConfig.for_model(model_type, **(WIDTH | sizes | special | changes))
        config = KvfoldConfig(text_config=base.to_dict(), attention=attention.to_dict())
        return randomise(KvfoldForCausalLM(config))

    return build


@pytest.fixture
def model(spec, model_of) -> KvfoldForCausalLM:
    return model_of(spec)


@pytest.fixture
def ids() -> Tensor:
    """Token ids of two sequences of twelve tokens."""
    return torch.randint(1, 32, (2, 12), generator=torch.Generator().manual_seed(2))
