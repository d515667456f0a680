"""Every variant inside a whole model: saving, training, compiling."""

import json

import torch
from transformers import AutoModelForCausalLM

from kvfold import KvfoldForCausalLM
from kvfold.attention import spec_from_dict


def loss_and_gradients(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def test_a_saved_model_is_the_same_model(model, ids, tmp_path):
    for module in model.attention_modules():
        module.rotary_index.random_(0, 4)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, KvfoldForCausalLM)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.specs() == model.config.specs()
    assert set(loaded.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)


def test_spec_survives_json(spec):
    assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_parameters_of_a_fresh_model_are_finite_and_norms_are_one(spec, model_of):
    model = KvfoldForCausalLM(model_of(spec).config)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if "norm" in name:
            assert (parameter == 1).all(), name
    for module in model.attention_modules():
        assert 0 <= module.rotary_index.min() and module.rotary_index.max() < 4


def test_gradient_checkpointing(model, ids):
    model.train()
    loss, gradients = loss_and_gradients(model, ids)
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    again, checkpointed = loss_and_gradients(model, ids)
    torch.testing.assert_close(again, loss, rtol=0, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-6, atol=1e-8)


def test_dropout_acts_in_training_only(spec, model_of, ids):
    model = model_of(spec, attention_dropout=0.5)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)
        model.train()
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
