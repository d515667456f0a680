"""Rotary positions by index."""

import torch

from kvfold.attention.base import common_heads, regroup
from kvfold.attention.rotary import rotate, select, uniform_index


def test_uniform_index_takes_the_fastest_first_at_a_stride():
    assert uniform_index(2, 4, 8).tolist() == [[0, 2, 4, 6]] * 2
    assert uniform_index(1, 3, 8).tolist() == [[0, 2, 5]]
    assert uniform_index(1, 8, 4).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]


def test_rotation_of_chosen_pairs():
    angles = torch.rand(1, 5, 8)
    tables = [torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin())]
    index = torch.tensor([[0, 3], [7, 7]])
    cos, sin = (select(table, index) for table in tables)
    assert cos.shape == (1, 2, 5, 2)
    x = torch.randn(1, 4, 5, 4)
    pairs = torch.complex(x[..., :2], x[..., 2:])
    expected = pairs * torch.polar(torch.ones(1, 2, 5, 2), angles[:, :, index].transpose(1, 2)).repeat_interleave(2, 1)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((expected.real, expected.imag), dim=-1))


def test_rotation_keeps_scores_relative():
    angles = torch.arange(6.0)[None, :, None] * torch.tensor([1.0, 0.1])
    cos, sin = (select(torch.cat((t, t), -1), uniform_index(1, 2, 2)) for t in (angles.cos(), angles.sin()))
    query, key = (torch.randn(4).expand(1, 1, 6, 4) for _ in range(2))
    scores = (rotate(query, cos, sin) @ rotate(key, cos, sin).transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])


def test_both_cached_tensors_are_laid_out_in_the_same_heads():
    assert common_heads((3, 64), (3, 64)) == 3
    assert common_heads((1, 96), (3, 8)) == 1
    assert common_heads((1, 12), (3, 8)) == 3
    assert common_heads((2, 32), (1, 16)) == 2
    assert common_heads((3, 32), (1, 16)) == 1
    x = torch.randn(2, 3, 5, 8)
    assert regroup(x, 3) is x
    assert regroup(x, 1).shape == (2, 1, 5, 24)
    assert regroup(x, 2).shape == (2, 2, 5, 12)
    torch.testing.assert_close(regroup(regroup(x, 2), 3), x)
