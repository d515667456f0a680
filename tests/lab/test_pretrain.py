"""Training from scratch: the same first weights, repeatable, resumable, and models that load."""

import pytest
import torch

import kvfold
from kvfold.errors import KvfoldError
from kvfold.lab import Architecture, new_model, pretrain
from kvfold.train.curve import read_curve

from .conftest import TINY, TRAIN

ATTENTIONS = {
    "mha": {},
    "mqa": {},
    "gqa": {"num_key_value_heads": 2},
    "gta": {"num_key_value_heads": 2},
    "mla": {"q_lora_rank": 16},
    "gla": {},
    "glaq": {"q_lora_rank": 16},
    "mlra": {"branches": 2},
}


def losses(run):
    return [row["loss"] for row in read_curve(run)]


def test_variants_begin_with_the_same_weights_wherever_they_have_the_same():
    one, other = (new_model(Architecture(attention=name, **TINY), seed=3).state_dict() for name in ("mha", "mqa"))
    same = {name for name in one if name in other and torch.equal(one[name], other[name])}
    assert {name for name in one if "k_proj" not in name and "v_proj" not in name} == same
    again, seed = (new_model(Architecture(attention="mha", **TINY), seed=seed).state_dict() for seed in (3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], seed["model.embed_tokens.weight"])


def test_first_weights_as_in_the_double_heads_paper():
    shape = Architecture(
        attention="gla", kv_lora_rank=16, q_lora_rank=8, zero_outputs=True, scaled_latents=True, **TINY
    )
    model = new_model(shape, seed=0)
    attention = model.model.layers[1].self_attn
    assert not attention.o_proj.weight.any() and not model.model.layers[0].mlp.down_proj.weight.any()
    assert attention.kv_a_layernorm.weight.detach().unique().tolist() == [2.0]  # (32 / 8)^1/2, of one of two
    assert attention.q_a_layernorm.weight.detach().unique().tolist() == [2.0]
    assert model.model.embed_tokens.weight.detach().std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_learns_and_its_model_loads(attention, text, tmp_path):
    run = tmp_path / "run"
    options = TINY | TRAIN | ATTENTIONS[attention] | {"steps": 40, "learning_rate": 0.01, "save_steps": 100}
    result = pretrain(run, attention=attention, data=text, **options)
    assert result.last_loss < result.first_loss - 1
    model, tokenizer = kvfold.load_model(run / "model")
    ids = tokenizer("the cell wall", return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 13, 264)
    assert tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0]).startswith("the cell wall")
    assert "Trained from scratch by `kvfold pretrain` for 40 steps" in (run / "model" / "README.md").read_text()


def test_a_killed_run_that_is_resumed_is_the_same(text, other_text, tmp_path):
    class Killed(BaseException):
        pass

    def killed(stage, done, total, note=""):
        if stage == "training" and done == 5:
            raise Killed

    options = TINY | TRAIN | {"attention": "gla", "data": text, "held_out": other_text, "held_out_steps": 2}
    whole, again, broken = tmp_path / "whole", tmp_path / "again", tmp_path / "broken"
    pretrain(whole, **options)
    pretrain(again, **options)
    assert losses(again) == losses(whole)
    with pytest.raises(Killed):
        pretrain(broken, progress=killed, **options)
    assert pretrain(broken, resume=True, **options).resumed_from == 3
    assert losses(broken) == losses(whole)
    expected = kvfold.load_model(whole / "model")[0].state_dict()
    assert all(torch.equal(expected[n], t) for n, t in kvfold.load_model(broken / "model")[0].state_dict().items())
    with pytest.raises(KvfoldError, match="of another model"):
        pretrain(broken, resume=True, **options | {"attention": "mla"})
    rows = read_curve(whole)
    assert {"step", "tokens", "loss", "rate", "grad_norm", "seconds"} == set(rows[0])


def test_a_tokenizer_for_the_text(text, tmp_path):
    options = TINY | TRAIN | {"tokenizer": "bpe", "vocab_size": 270, "attention": "mha", "data": text}
    pretrain(tmp_path / "run", **options)
    _, tokenizer = kvfold.load_model(tmp_path / "run" / "model")
    assert len(tokenizer) == 270
    assert tokenizer.decode(tokenizer("under a root").input_ids) == "under a root"


MISTAKES = {
    "small": ({"vocab_size": 100}, "the tokenizer bytes has 257 tokens, vocab_size is 100: raise it."),
    "bpe": ({"vocab_size": 100, "tokenizer": "bpe"}, "a bpe tokenizer has at least 257 tokens, vocab_size is 100"),
    "tokenizer": ({"tokenizer": "bite"}, "bite"),
    "key": ({"batches": 3}, "unknown recipe key 'batches'. Did you mean 'batch'?"),
    "healing": ({"lora_rank": 3}, "unknown recipe key 'lora_rank'"),
    "heads": ({"attention": "gqa", "num_key_value_heads": 3}, "must divide num_attention_heads=4"),
    "positions": ({"max_position_embeddings": 8}, "sequence_length is 16, the model has 8 positions"),
    "empty": ({"data": "empty.txt"}, "empty.txt"),
    "tracker": ({"report_to": "tensorbord"}, "tensorbord"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, text, tmp_path, one_line, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    changes, expected = MISTAKES[name]
    with pytest.raises(KvfoldError) as error:
        pretrain(tmp_path / "run", **TINY | TRAIN | {"attention": "mha", "data": text} | changes)
    assert expected in one_line(error)
    assert not (tmp_path / "run" / "model").exists()
