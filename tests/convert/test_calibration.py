"""What is seen layer by layer is what the whole models do."""

import copy

import pytest
import torch
from transformers import LlamaConfig

from kvfold import convert, load_model
from kvfold.attention import GroupedSpec, LayerContext, build_attention
from kvfold.checkpoint import open_checkpoint
from kvfold.convert.calibration import DRIFT_SHARE, ORIGINAL, AttentionSample, LayerRunner, rotary_embedding
from kvfold.convert.weights import read_layer
from kvfold.families import family_of


@pytest.mark.parametrize(("scale", "error"), [(0.0, 0.0), (1.0, 0.25)])
def test_relative_error_of_a_pruned_layer_and_of_another(scale, error):
    spec = GroupedSpec(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = LlamaConfig(attn_implementation="sdpa")
    attention = build_attention(spec, LayerContext(config=config, layer_idx=0, base_pairs=4)).eval()
    hidden, angles = torch.randn(1, 5, 32), torch.randn(1, 5, 8)
    rotation = (angles.cos(), angles.sin())
    with torch.no_grad():
        attention.o_proj.weight *= scale
        output, _ = attention(hidden, rotation, None)
        sample = AttentionSample(
            inputs=hidden, position_embeddings=rotation, attention_mask=None, target=output.clone()
        )
        attention.o_proj.weight *= 1.5
    assert sample.relative_error(attention) == pytest.approx(error)


MODELS = {
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "window": {"model_type": "mistral", "head_dim": 8, "sliding_window": 6},
}
STAGE = "stage"


def windows(seed):
    return torch.randint(27, (5, 24), generator=torch.Generator().manual_seed(seed))


def trace(network, ids):
    """Logits, the hidden states before every layer, and every attention's input and output."""
    seen, handles = [], []
    for layer in network.model.layers:
        handles.append(
            layer.self_attn.register_forward_hook(
                lambda module, args, kwargs, output: seen.append((kwargs["hidden_states"], output[0])), with_kwargs=True
            )
        )
    with torch.no_grad():
        output = network(input_ids=ids, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    return output.logits, output.hidden_states, seen


class Walk:
    """An original, a model converted from it, and a runner that goes through their layers."""

    def __init__(self, folder, converted):
        self.original, self.converted = (load_model(path)[0] for path in (folder, converted))
        self.checkpoint = open_checkpoint(folder)
        self.family = family_of(self.checkpoint.config)
        self.specs = self.family.layer_specs(self.checkpoint.config)
        self.rotary = rotary_embedding(self.checkpoint.config, self.family)
        self.runner = LayerRunner(
            self.checkpoint, self.family, windows(0), windows(1), stages=(STAGE,), attention=False, follow=True
        )

    def layers(self):
        """Each layer's number, its converted attention, and what is seen of it."""
        for index, module in enumerate(self.converted.attention_modules()):
            weights = read_layer(self.checkpoint, self.family, self.specs[index], index, self.rotary)
            seen = self.runner.run_layer(index, weights)
            yield index, copy.deepcopy(module), seen
            self.runner.drop_layer()


@pytest.fixture(params=MODELS)
def walk(request, save_model, text, tmp_path):
    folder = save_model(**MODELS[request.param])
    calibration = {"calibration": [text], "calibration_tokens": 96, "calibration_window": 24}
    convert(folder, tmp_path / "converted", cache_ratio=0.4, one_shot=True, **calibration)
    return Walk(folder, tmp_path / "converted")


def test_a_layer_is_fitted_on_the_converted_prefix_to_make_up_for_half_of_the_drift(walk):
    _, before, originals = trace(walk.original, windows(0))
    _, converted_before, inputs = trace(walk.converted, windows(0))
    for index, attention, seen in walk.layers():
        x, answer = originals[index]
        torch.testing.assert_close(seen.sample.inputs, x)
        torch.testing.assert_close(seen.sample.target, answer)
        flat = x.flatten(0, 1).double()
        torch.testing.assert_close(seen.statistics.mean, flat.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen.statistics.second_moment, flat.T @ flat / len(flat), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen.fit.inputs, inputs[index][0], rtol=1e-4, atol=1e-4)
        target = answer + DRIFT_SHARE * (before[index] - converted_before[index])
        torch.testing.assert_close(seen.fit.target, target, rtol=1e-4, atol=1e-4)
        walk.runner.follow(index, attention)


def cross_entropy(logits, ids):
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def test_losses_of_a_stage_are_those_of_the_whole_model(walk):
    for index, attention, _ in walk.layers():
        walk.runner.probe(index, STAGE, attention)
    losses = walk.runner.probe_losses()
    for stage, network in ((ORIGINAL, walk.original), (STAGE, walk.converted)):
        assert losses[stage] == pytest.approx(cross_entropy(trace(network, windows(1))[0], windows(1)), rel=1e-4)
    assert abs(losses[STAGE] - losses[ORIGINAL]) > 0.01


def test_a_branch_is_the_original_with_one_layer_converted(walk):
    log_p = trace(walk.original, windows(1))[0].log_softmax(-1)
    for index, attention, _ in walk.layers():
        walk.runner.branch(index, attention)
    expected = []
    for index, attention in enumerate(walk.converted.attention_modules()):
        hybrid = copy.deepcopy(walk.original)
        hybrid.model.layers[index].self_attn = attention
        log_q = trace(hybrid, windows(1))[0].log_softmax(-1)
        expected.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    assert min(expected) > 0.01
    assert walk.runner.branch_divergences() == pytest.approx(expected, rel=1e-3)
