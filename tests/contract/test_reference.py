"""Every path of every variant against the naive twin, in fp64: outputs and gradients."""

import pytest
import torch

from kvfold.attention.reference import REFERENCES

CAUSAL = torch.ones(11, 11, dtype=torch.bool).tril()
MASKS = {
    "causal": CAUSAL.expand(2, -1, -1),
    "left padding": CAUSAL & (torch.arange(11) >= torch.tensor([0, 4])[:, None, None]),
    "window": (CAUSAL & ~CAUSAL.tril(-4)).expand(2, -1, -1),
}


def forms(mask):
    """The ways in which transformers may hand a mask over."""
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    return {"boolean": mask[:, None], "additive": additive[:, None]}


def compare(layer, mask, given):
    """Outputs and all gradients of both, on the tokens that see something."""
    seen = mask.any(-1)
    results = []
    hidden = layer.hidden.requires_grad_()
    inputs = {"hidden": hidden, **dict(layer.module.named_parameters())}
    for output in (
        layer.module(hidden, layer.tables(), given)[0],
        REFERENCES[layer.module.spec.kind](layer.module, hidden, layer.phase, mask),
    ):
        loss = (output[seen] * torch.linspace(-1, 1, output[seen].numel()).view_as(output[seen])).sum()
        results.append((output[seen], torch.autograd.grad(loss, list(inputs.values()))))
    (output, gradients), (expected, expected_gradients) = results
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    for name, gradient, reference in zip(inputs, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")
        assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize(("form", "implementation"), [("boolean", "sdpa"), ("additive", "sdpa"), ("boolean", "eager")])
@pytest.mark.parametrize("mask", MASKS)
def test_expanded(layer, mask, form, implementation):
    layer.module.path = "expanded"
    layer.module.config._attn_implementation = implementation
    compare(layer, MASKS[mask], forms(MASKS[mask])[form])


@pytest.mark.parametrize(("mask", "form"), [("causal", "additive"), ("left padding", "boolean"), ("window", "boolean")])
def test_absorbed(layer, mask, form):
    if layer.module.spec.absorbed_flops(1, 1) is None:
        pytest.skip("this variant has one path")
    layer.module.path = "absorbed"
    compare(layer, MASKS[mask], forms(MASKS[mask])[form])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_without_a_mask_attention_is_causal(layer, implementation):
    layer.module.config._attn_implementation = implementation
    compare(layer, MASKS["causal"], None)


def test_cheaper_path_of_its_own_choice(layer):
    compare(layer, MASKS["causal"], MASKS["causal"][:, None])


def test_shapes_and_weights(layer):
    spec = layer.module.spec
    output, weights = layer.module(layer.hidden, layer.tables(), MASKS["causal"][:, None])
    assert output.shape == (2, 11, spec.hidden_size)
    heads = spec.num_attention_heads * (spec.branches if spec.kind == "latent" else 1)
    assert weights.shape == (2, heads, 11, 11)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, heads, 11).double())
    assert not weights.masked_select(~CAUSAL).any()


def test_the_future_changes_nothing(layer):
    before = layer.output()
    layer.hidden[:, 6:] += 1
    torch.testing.assert_close(layer.output()[:, :6], before[:, :6], rtol=0, atol=0)


def test_half_precision_softmax_runs_in_fp32(layer):
    expected = layer.output()
    layer.module.bfloat16()
    tables = tuple(table.bfloat16() for table in layer.tables())
    output, _ = layer.module(layer.hidden.bfloat16(), tables)
    assert output.dtype == torch.bfloat16
    assert (output - expected).norm() / expected.norm() < 0.02
