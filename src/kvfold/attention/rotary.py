"""Rotary positions by index: a module keeps which base frequency each of its pairs uses, and selects from the base
model's `cos, sin`, so that every kind of rope scaling keeps working.

Layout: HF's halves. Pair `l` of a vector of width `2r` is dims `l` and `l + r`; as one complex number, position `t`
multiplies it by `exp(i theta_l t)` (RoFormer, arXiv 2104.09864).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def uniform_index(heads: int, pairs: int, base_pairs: int) -> Int[Tensor, "heads pairs"]:
    """`pairs` of `base_pairs` frequencies at a uniform stride, the fastest first, the same for every head.

    With a stride that divides, these are the frequencies theta^(-2j/d_r) of DeepSeek's MLA. More pairs than frequencies
    repeat some of them, as a rotary head that mixes several original heads needs.
    """
    index = torch.arange(pairs) * base_pairs // pairs
    return index.repeat(heads, 1)


def select(table_BTd: Float[Tensor, "B T d"], index_hp: Int[Tensor, "h p"]) -> Float[Tensor, "B h T p"]:
    """Pick from a base `cos` or `sin` table (width d = 2P, both halves equal) the frequencies in `index_hp`."""
    return table_BTd[:, :, index_hp].transpose(1, 2)


def rotate(
    x_BhTd: Float[Tensor, "B h T d"], cos_BgTp: Float[Tensor, "#B g T p"], sin_BgTp: Float[Tensor, "#B g T p"]
) -> Float[Tensor, "B h T d"]:
    """Rotate the pairs of `x` (d = 2p) by the given angles; the tables' heads g divide h and are repeated."""
    heads, table_heads = x_BhTd.shape[1], cos_BgTp.shape[1]
    if table_heads not in (1, heads):
        cos_BgTp = cos_BgTp.repeat_interleave(heads // table_heads, dim=1)
        sin_BgTp = sin_BgTp.repeat_interleave(heads // table_heads, dim=1)
    real, imaginary = x_BhTd.chunk(2, dim=-1)
    return torch.cat(
        (real * cos_BgTp - imaginary * sin_BgTp, imaginary * cos_BgTp + real * sin_BgTp),
        dim=-1,
    )
