import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvfold.errors import OptionError, UnknownNameError
from kvfold.evaluate import cache_keyword, forward_cached, measure_cache, quantized, quantized_cache_factory
from kvfold.evaluate.quantized import pack, unpack


def naive_round_trip(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """One number at a time, as the docstring of `pack` defines it."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], group):
            values = x[row, start : start + group]
            minimum = values.min().bfloat16().float()
            scale = ((values.max() - minimum) / (2**bits - 1)).bfloat16().float()
            for i, value in enumerate(values):
                code = max(0, min(2**bits - 1, round(((value - minimum) / scale).item())))
                out[row, start + i] = minimum + code * scale
    return out


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_pack_is_its_naive_twin(bits):
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    packed = pack(x, bits=bits, group_size=8)
    assert packed.codes.shape == (3, 24 * bits // 8)
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


def test_odd_dims_cannot_be_packed():
    layer = quantized.GroupedLayer(bits=4, group_size=32)
    odd = torch.zeros(1, 1, 1, 7)
    with pytest.raises(OptionError, match="a head dim of 7 cannot be packed at 4 bits"):
        layer.update(odd, odd)
