"""The streamed moments are those of their definition, one row, head and pair after another."""

import itertools

import pytest
import torch

from kvfold.convert.attention_moments import ROW_STEP, near

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


def at(pair, cos, sin):
    """One pair as a complex number (T, h), rotated by other tables."""
    return torch.complex(pair[..., 0], pair[..., 1]) * torch.complex(cos, sin)[:, None]


def naive(weights, hidden_WTD, cos, sin, mask):
    """The means, by loops, from `AttentionMoments`' docstring alone."""
    heads, pairs = weights.spec.num_attention_heads, weights.spec.head_dim // 2
    gram, target = torch.zeros(heads, pairs, 4, 4).double(), torch.zeros(heads, pairs, 4).double()
    energy = torch.zeros(heads, pairs).double()
    places = near(weights.spec.num_key_value_heads, pairs)
    slot_gram, slot_target = (
        torch.zeros(heads, *places.shape, 2, 2).double(),
        torch.zeros(heads, *places.shape, 2).double(),
    )
    value, rows = 0, 0
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
                for p in range(pairs):
                    f = torch.stack([torch.outer(query[i, n, :, p], key[j, g, :, p]).flatten() for j in seen])
                    s = torch.stack([turned_query[i, n, :, p] @ turned_key[j, g, :, p] for j in seen])
                    f, s = f - a @ f, s - a @ s
                    gram[n, p] += f.T @ (a[:, None] * f)
                    target[n, p] += f.T @ (a * s)
                    energy[n, p] += a @ s.square()
                for w, s in itertools.product(*map(range, places.shape)) if places.shape[1] > 1 else ():
                    pair = places[w, s]
                    q, k = at(query[..., pair], cos[:, w], sin[:, w]), at(key[..., pair], cos[:, w], sin[:, w])
                    product = torch.stack([q[i, n].conj() * k[j, g] for j in seen])
                    f = torch.stack((product.real, -product.imag), dim=1)
                    t = torch.stack([turned_query[i, n, :, pair] @ turned_key[j, g, :, pair] for j in seen])
                    f, t = f - a @ f, t - a @ t
                    slot_gram[n, w, s] += f.T @ (a[:, None] * f)
                    slot_target[n, w, s] += f.T @ (a * t)
    return {
        "bare_gram": gram / rows,
        "bare_target": target / rows,
        "rotated_energy": energy / rows,
        "slot_gram": slot_gram / rows,
        "slot_target": slot_target / rows,
        "value_moment": value / rows,
    }


LAYERS = {
    "GQA": {"head_dim": 6, "biases": False},
    "GQA with biases and a gain": {"head_dim": 6, "rope_gain": 1.3},
    "MHA": {"head_dim": 6, "heads": 2, "kv_heads": 2},
    "MQA with neighbours on both sides": {"head_dim": 10, "heads": 2, "kv_heads": 1},
    "MQA of a single pair, near nothing else": {"head_dim": 2, "heads": 2, "kv_heads": 1},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_moments_are_those_of_the_naive_loops(make_layer, observe, tables, mask, layer):
    weights = make_layer(**LAYERS[layer])
    hidden = torch.randn(3, LENGTH, 12, generator=torch.Generator().manual_seed(2)) + 0.3
    moments = observe(weights, hidden, MASKS[mask]).attention
    expected = naive(weights, hidden, *tables(weights, LENGTH), CAUSAL if MASKS[mask] is None else MASKS[mask])
    for name, value in expected.items():
        torch.testing.assert_close(
            getattr(moments, name), value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("heads", "pairs", "reach"), [(2, 8, 2), (1, 3, 1), (16, 8, 1), (32, 8, 0), (2, 1, 0)])
def test_as_many_neighbours_on_both_sides_and_fewer_of_many_heads(heads, pairs, reach):
    places = near(heads, pairs)
    assert places.shape == (pairs, 2 * reach + 1)
    assert bool((places.diff(dim=1) == 1).all())
    assert (int(places.min()), int(places.max())) == (0, pairs - 1)
    inner = range(reach, pairs - reach)
    assert places[inner, reach].tolist() == list(inner)
    assert all(pair in row for pair, row in enumerate(places.tolist()))
