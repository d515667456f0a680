"""torch.compile gives what eager gives."""

import jaxtyping
import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler():
    """The compiler must not trace through the tests' shape checks, which users do not have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    jaxtyping.config.update("jaxtyping_disable", False)


def test_the_graph_of_a_layer_is_whole(layer):
    """Tracing without breaks; code generation is left to the slow test."""
    compiled = torch.compile(layer.module, backend="eager", fullgraph=True)
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
    output, _ = compiled(layer.hidden, layer.tables(), mask)
    torch.testing.assert_close(output, layer.output(mask))


@pytest.mark.parametrize("spec", ["mla_of_gqa"], indirect=True)
def test_a_compiled_model_trains_alike(model, ids):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = [run(input_ids=ids, labels=ids, use_cache=False).loss for run in (model, compiled)]
    torch.testing.assert_close(*losses)
    expected, gradients = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["mla"], indirect=True)
def test_generated_code(layer):
    compiled = torch.compile(layer.module, fullgraph=True)
    mask = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        torch.testing.assert_close(compiled(layer.hidden, layer.tables(), mask)[0], layer.output(mask))
