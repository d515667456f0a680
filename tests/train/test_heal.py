"""Whole runs: they come closer, repeat themselves, go on where they were, and leave folders that load."""

import json

import pytest
import torch

import kvfold
from kvfold.errors import KvfoldError
from kvfold.train import heal
from kvfold.train.curve import read_curve

RUN = {"steps": 8, "batch": 4, "sequence_length": 16, "save_steps": 3, "precision": "float32"}


@pytest.fixture
def options(text):
    return RUN | {"data": (text,)}


class Killed(BaseException):
    pass


def killed_at(step):
    """A progress callback that ends the process, as far as a test can, after a step is done."""

    def progress(stage, done, total):
        if stage == "healing" and done == step:
            raise Killed

    return progress


def losses(run):
    return [row["loss"] for row in read_curve(run)]


def weights_of(folder):
    model, _ = kvfold.load_model(folder)
    return model.state_dict()


@pytest.mark.parametrize("which", ["original", "converted"])
def test_a_run_lowers_the_loss_and_leaves_a_model(which, request, options, tmp_path):
    source, run = request.getfixturevalue(which), tmp_path / "run"
    result = heal(source, run, **options | {"steps": 60, "learning_rate": 0.01})
    assert result.last_loss < result.first_loss - 0.3
    assert len(losses(run)) == result.steps == 60 and result.tokens == 60 * 4 * 16
    model, _ = kvfold.load_model(run / "model")
    assert type(model) is type(kvfold.load_model(source)[0])
    assert [path.name for path in sorted(run.glob("checkpoint-*"))] == ["checkpoint-57", "checkpoint-60"]
    assert all(kvfold.load_model(path) for path in run.glob("checkpoint-*"))
    assert not list(run.glob(".*"))
    card = (run / "model" / "README.md").read_text()
    assert "for 60 steps, 3,840 tokens of" in card and ("calibrat" in card) is (which == "converted")


def test_a_killed_run_that_is_resumed_is_the_same(converted, options, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    heal(converted, whole, **options)
    for step in (5, 7):
        with pytest.raises(Killed):
            heal(converted, broken, resume=True, progress=killed_at(step), **options)
    result = heal(converted, broken, resume=True, **options)
    assert result.resumed_from == 6
    assert losses(broken) == losses(whole)
    expected = weights_of(whole / "model")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(broken / "model").items())


def test_a_finished_run_is_not_run_again(converted, options, tmp_path):
    run = tmp_path / "run"
    first = heal(converted, run, **options)
    again = heal(converted, run, resume=True, progress=killed_at(1), **options)
    assert again.last_loss == first.last_loss


def test_only_attention_moves_if_asked(converted, options, tmp_path):
    heal(converted, tmp_path / "run", **options | {"trains": "attention"})
    before, after = weights_of(converted), weights_of(tmp_path / "run" / "model")
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved and all("self_attn" in name for name in moved)


def test_accumulated_parts_give_the_same_losses(converted, options, tmp_path):
    at_once, parts = tmp_path / "one", tmp_path / "two"
    heal(converted, at_once, **options)
    heal(converted, parts, **options | {"accumulate": 2})
    torch.testing.assert_close(losses(parts), losses(at_once), rtol=1e-4, atol=1e-5)


def test_a_student_that_is_its_own_teacher_loses_only_the_cross_entropy(original, options, tmp_path):
    alone, taught = tmp_path / "alone", tmp_path / "taught"
    heal(original, alone, **options)
    heal(original, taught, **options | {"teacher": str(original)})
    assert losses(taught)[0] == pytest.approx(losses(alone)[0], abs=1e-5)
    assert losses(taught)[-1] != losses(alone)[-1]


def test_the_order_follows_from_the_seed(converted, options, tmp_path):
    heal(converted, tmp_path / "zero", **options)
    heal(converted, tmp_path / "one", **options | {"seed": 1})
    assert losses(tmp_path / "zero")[0] != losses(tmp_path / "one")[0]


MISTAKES = {
    "no data": ({"data": ()}, "no training data was given: name a file or a dataset with --data."),
    "missing": ({"data": "gone.txt"}, "cannot read text file gone.txt: No such file or directory."),
    "missing table": ({"data": "gone.jsonl"}, "training data gone.jsonl does not exist: give the path of a file."),
    "twice": ({"data": ("a", "a")}, "data names a source twice: name it once, with a larger weight."),
    "too long": ({"sequence_length": 1000}, "has 600 tokens, one sequence takes 1000"),
    "warm-up": ({"warmup": 0.7, "decay": 0.5}, "warmup and decay are 0.7 and 0.5 of the steps: more than all."),
    "rate": ({"learning_rate": 0.0}, "learning_rate must be a positive number, got 0.0."),
    "parts": ({"accumulate": 3}, "accumulate must divide batch, 4, got 3."),
    "what": ({"trains": "attn"}, "attention"),
    "unknown": ({"step": 3}, "steps"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, converted, options, tmp_path, one_line):
    changes, expected = MISTAKES[name]
    with pytest.raises(KvfoldError) as error:
        heal(converted, tmp_path / "run", **options | changes)
    assert expected in one_line(error)
    assert not (tmp_path / "run").exists()


def test_another_run_is_not_gone_on_with(original, converted, options, tmp_path, one_line):
    run = tmp_path / "run"
    heal(converted, run, **options)
    with pytest.raises(KvfoldError) as error:
        heal(converted, run, **options)
    assert "holds a run of 8 step(s): go on with --resume" in one_line(error)
    with pytest.raises(KvfoldError) as error:
        heal(original, run, resume=True, **options)
    assert "is of another model" in one_line(error)
    with pytest.raises(KvfoldError) as error:
        heal(converted, run, resume=True, **options | {"learning_rate": 0.1})
    assert "has learning_rate 0.0005, not 0.1" in one_line(error)
    (run / "run.json").write_text("{")
    with pytest.raises(KvfoldError) as error:
        heal(converted, run, resume=True, **options)
    assert "run.json is damaged" in one_line(error)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    with pytest.raises(KvfoldError) as error:
        heal(converted, tmp_path / "other", overwrite=True, **options)
    assert "holds something else" in one_line(error)


def test_a_loss_that_is_no_number_ends_the_run(converted, options, tmp_path, one_line):
    with pytest.raises(KvfoldError) as error:
        heal(converted, tmp_path / "run", **options | {"learning_rate": 1e30, "steps": 30})
    assert "lower the learning rate" in one_line(error)


def test_a_full_disk_keeps_the_last_checkpoint(converted, options, tmp_path, monkeypatch, one_line):
    from kvfold.train import trainer

    saved = []

    def full(self, *arguments, **named):
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(True)
        return original_save(self, *arguments, **named)

    original_save = trainer.Trainer._save_optimizer_and_scheduler
    monkeypatch.setattr(trainer.Trainer, "_save_optimizer_and_scheduler", full)
    run = tmp_path / "run"
    with pytest.raises(KvfoldError) as error:
        heal(converted, run, **options)
    assert "No space left on device" in one_line(error)
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]
    assert not list(run.glob(".*"))
    assert json.loads((run / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3
