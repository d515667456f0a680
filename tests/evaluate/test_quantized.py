import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from kvfold import KvfoldConfig, KvfoldForCausalLM
from kvfold.attention import LatentSpec
from kvfold.errors import OptionError, UnknownNameError
from kvfold.evaluate import cache_keyword, forward_cached, measure_cache, quantized, quantized_cache_factory
from kvfold.evaluate.quantized import pack, packed_bytes, unpack


def naive_round_trip(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """One number at a time, as the docstring of `pack` defines it."""
    out = torch.empty_like(x)
    dim = x.shape[1]
    size = math.ceil(dim / math.ceil(dim / group))
    for row in range(x.shape[0]):
        for start in range(0, dim, size):
            values = x[row, start : start + size]
            minimum = values.min().bfloat16().float()
            scale = ((values.max() - minimum) / (2**bits - 1)).bfloat16().float()
            for i, value in enumerate(values):
                code = max(0, min(2**bits - 1, round(((value - minimum) / scale).item())))
                out[row, start + i] = minimum + code * scale
    return out


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [3, 5, 8, 24, 25, 31])
def test_pack_is_its_naive_twin(bits, dim):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(0))
    packed = pack(x, bits=bits, group_size=8)
    assert packed.codes.shape == (3, math.ceil(dim * bits / 8))
    assert packed.scale.shape == packed.minimum.shape == (3, math.ceil(dim / 8), 1)
    held = sum(part.nbytes for part in (packed.codes, packed.scale, packed.minimum))
    assert held == 3 * packed_bytes(dim, bits=bits, group_size=8)
    torch.testing.assert_close(unpack(packed, bits=bits, dtype=x.dtype), naive_round_trip(x, bits, 8))


def test_constant_groups_are_kept():
    x = torch.tensor([[0.0] * 8, [2.0] * 8])
    assert torch.equal(unpack(pack(x, bits=4, group_size=8), bits=4, dtype=x.dtype), x)


def test_int4_in_groups_of_32_takes_five_bits(deepseek):
    size = measure_cache(deepseek, quantized_cache_factory(deepseek.config)())
    # A latent of 32 is one group; the rotary head of 8 is a group by itself, with its own scale and minimum.
    assert size.bytes_per_token == 2 * (32 // 2 + 4 + 8 // 2 + 4)


def test_a_step_by_step_cache_is_the_prefilled_one(llama, token_ids):
    ids = token_ids[None, :40]
    whole, steps = (quantized_cache_factory(llama.config)() for _ in range(2))
    with torch.no_grad():
        forward_cached(llama, ids, whole)
        for token in ids.split(1, dim=1):
            forward_cached(llama, token, steps)
    assert whole.get_seq_length() == steps.get_seq_length() == 40
    for first, second in zip(whole.layers, steps.layers, strict=True):
        assert (first._quantized_keys[0] != second._quantized_keys[0]).float().mean() < 0.01  # ties of rounding


def test_eight_bits_are_close_to_the_plain_cache(llama, token_ids):
    ids = token_ids[None, :40]
    with torch.no_grad():
        plain = forward_cached(llama, ids, DynamicCache(config=llama.config)).logits
        quantised = forward_cached(llama, ids, quantized_cache_factory(llama.config, nbits=8)()).logits
    assert (plain - quantised).abs().max() < 0.01 * plain.abs().max()


def test_generate_takes_the_cache(llama):
    prompt = torch.tensor([[5, 6, 7]])
    held = {cache_keyword(llama): quantized_cache_factory(llama.config)()}
    assert llama.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0, **held).shape[1] <= 8


def test_mistakes_are_named(llama, monkeypatch):
    with pytest.raises(OptionError, match="the grouped cache stores 2, 4, 8 bits, not 5"):
        quantized_cache_factory(llama.config, nbits=5)
    with pytest.raises(OptionError, match="q_group_size must be at least 1, not 0"):
        quantized_cache_factory(llama.config, q_group_size=0)
    with pytest.raises(UnknownNameError, match="Known: grouped, hqq, quanto"):
        quantized_cache_factory(llama.config, backend="int4")
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    for backend in ("hqq", "quanto"):
        with pytest.raises(OptionError, match=rf"{backend} cache needs .* pip install 'kvfold\[quant\]'"):
            quantized_cache_factory(llama.config, backend=backend)


WIDTHS = ((96, 24), (97, 6), (33, 10))
"""Latent rank and rotary dims: whole groups, a prime, one more than a group."""


@pytest.fixture
def converted(randomise) -> KvfoldForCausalLM:
    """Layers whose two cached tensors differ in width, from each other and from layer to layer."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = LlamaConfig(**shape, vocab_size=128, intermediate_size=96, num_hidden_layers=len(WIDTHS), head_dim=32)
    specs = [
        LatentSpec(**shape, kv_lora_rank=rank, qk_rope_head_dim=rope, qk_nope_head_dim=32, v_head_dim=32)
        for rank, rope in WIDTHS
    ]
    config = KvfoldConfig(text_config=base.to_dict(), attention=[spec.to_dict() for spec in specs])
    return randomise(KvfoldForCausalLM(config))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_converted_model_is_stored_at_its_real_bytes(converted, bits):
    size = measure_cache(converted, quantized_cache_factory(converted.config, nbits=bits)())
    assert size.elements_per_layer == tuple(rank + rope for rank, rope in WIDTHS)
    expected = {4: (96 // 2 + 12) + (12 + 4) + (49 + 16) + (3 + 4) + (17 + 8) + (5 + 4)}
    expected[8] = expected[4] + sum(rank // 2 + rope // 2 for rank, rope in WIDTHS)
    assert size.bytes_per_token == expected[bits]
    assert size.bytes_per_token == sum(packed_bytes(width, bits=bits) for widths in WIDTHS for width in widths)


def test_finer_codes_of_latents_are_closer(converted, token_ids):
    ids = token_ids[None, :40]
    with torch.no_grad():
        plain = forward_cached(converted, ids, DynamicCache(config=converted.config)).logits
        errors = [
            (forward_cached(converted, ids, quantized_cache_factory(converted.config, nbits=bits)()).logits - plain)
            .abs()
            .max()
            for bits in (2, 4, 8)
        ]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert errors[2] < 0.02 * plain.abs().max()
