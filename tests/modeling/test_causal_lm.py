"""The model as transformers sees it: outputs, training, Auto classes."""

import copy
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold import KvfoldConfig, KvfoldForCausalLM, load_model
from kvfold.errors import OptionError
from kvfold.modeling.remote_code import _STUB_TEXT, STUB


@torch.no_grad()
def test_auto_classes(model, folder, ids):
    assert isinstance(AutoConfig.from_pretrained(folder), KvfoldConfig)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert isinstance(loaded, KvfoldForCausalLM)
    assert loaded.config.specs() == model.config.specs()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)


@torch.no_grad()
def test_load_model(model, folder, ids):
    loaded, tokenizer = load_model(folder)
    assert not loaded.training
    assert tokenizer("a b")["input_ids"] == [1, 2]
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)
    half, _ = load_model(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_remote_code_stub(model, folder, ids):
    (folder / f"{STUB}.py").write_text(_STUB_TEXT, "utf-8")
    config = AutoConfig.from_pretrained(folder)
    config.auto_map = {"AutoConfig": f"{STUB}.KvfoldConfig", "AutoModelForCausalLM": f"{STUB}.KvfoldForCausalLM"}
    config.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=0)
    assert "pip install kvfold" in _STUB_TEXT


@torch.no_grad()
def test_hidden_states(model, ids):
    outputs = model(input_ids=ids, output_hidden_states=True)
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(2, 9, 32)] * 3


def test_attention_weights_are_refused(model, ids, one_line):
    with pytest.raises(OptionError, match="kvfold models return no attention weights") as error:
        model(input_ids=ids, output_attentions=True)
    one_line(error)


@torch.no_grad()
def test_copies_are_independent(model, ids):
    expected = model(input_ids=ids).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(input_ids=ids).logits, expected, rtol=0, atol=0)
        twin.model.embed_tokens.weight.zero_()
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=0)


def test_loss(model, ids):
    logits = model(input_ids=ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_lowers_the_loss(model, ids, checkpointing):
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_numbers_that_tools_read_from_the_config(config):
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    assert [getattr(config, name) for name in names] == [64, 32, 2, 4, 128]
    assert config.get_text_config(decoder=True).model_type == "llama"
    assert config.windows() == (None, None)


def test_attention_modules_in_order(model):
    assert [module.layer_idx for module in model.attention_modules()] == [0, 1]
