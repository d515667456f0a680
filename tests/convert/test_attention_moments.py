"""The streamed moments are those of their definition, one row, head and pair after another."""

import pytest
import torch

from kvfold.convert.attention_moments import ROW_STEP

LENGTH = 23
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
MASKS = {"causal": None, "sliding window": CAUSAL & ~CAUSAL.tril(-6)}


def project(hidden, weight, bias):
    """Rotary pairs of every head as 2-vectors, by token and head: (T, h, 2, P)."""
    flat = torch.einsum("td,hcd->thc", hidden, weight) + (0 if bias is None else bias)
    return flat.unflatten(-1, (2, -1))


def turned(pairs, cos, sin):
    width = pairs.shape[-1]
    cos, sin = cos[:, None, :width], sin[:, None, :width]
    real, imaginary = pairs.unbind(2)
    return torch.stack((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=2)


def naive(weights, hidden_WTD, cos, sin, mask):
    """The means, by loops, from `AttentionMoments`' docstring alone."""
    heads, pairs = weights.spec.num_attention_heads, weights.spec.head_dim // 2
    gram, target = torch.zeros(heads, pairs, 4, 4).double(), torch.zeros(heads, pairs, 4).double()
    energy = torch.zeros(heads, pairs).double()
    value, distance, rows = 0, torch.zeros(LENGTH).double(), 0
    for window, x in enumerate(hidden_WTD.double()):
        query, key = project(x, weights.query, weights.query_bias), project(x, weights.key, weights.key_bias)
        turned_query, turned_key = turned(query, cos, sin), turned(key, cos, sin)
        for i in range(window % ROW_STEP, LENGTH, ROW_STEP):
            rows += 1
            seen = [j for j in range(LENGTH) if mask[i, j]]
            for n in range(heads):
                g = n // weights.spec.query_groups
                scores = torch.stack([(turned_query[i, n] * turned_key[j, g]).sum() for j in seen])
                a = (scores * weights.spec.head_dim**-0.5).softmax(0)
                read = sum(share * x[j] for share, j in zip(a, seen, strict=True))
                value = value + torch.outer(read, read) / heads
                for share, j in zip(a, seen, strict=True):
                    distance[i - j] += share / heads
                for p in range(pairs):
                    f = torch.stack([torch.outer(query[i, n, :, p], key[j, g, :, p]).flatten() for j in seen])
                    s = torch.stack([turned_query[i, n, :, p] @ turned_key[j, g, :, p] for j in seen])
                    f, s = f - a @ f, s - a @ s
                    gram[n, p] += f.T @ (a[:, None] * f)
                    target[n, p] += f.T @ (a * s)
                    energy[n, p] += a @ s.square()
    return {
        "bare_gram": gram / rows,
        "bare_target": target / rows,
        "rotated_energy": energy / rows,
        "value_moment": value / rows,
        "distance": distance / rows,
    }


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("biases", "gain"), [(False, 1.0), (True, 1.3)])
def test_moments_are_those_of_the_naive_loops(make_layer, observe, tables, mask, biases, gain):
    weights = make_layer(head_dim=6, biases=biases, rope_gain=gain)
    hidden = torch.randn(3, LENGTH, 12, generator=torch.Generator().manual_seed(2)) + 0.3
    moments = observe(weights, hidden, MASKS[mask]).attention
    expected = naive(weights, hidden, *tables(weights, LENGTH), CAUSAL if MASKS[mask] is None else MASKS[mask])
    for name, value in expected.items():
        torch.testing.assert_close(getattr(moments, name), value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert float(moments.distance.sum()) == pytest.approx(1)
    if mask == "sliding window":
        assert not moments.distance[6:].any()


