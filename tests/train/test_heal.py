"""Whole runs: they come closer, repeat themselves, go on where they were, and leave folders that load."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvfold
from kvfold.errors import KvfoldError
from kvfold.train import heal
from kvfold.train.curve import read_curve

RUN = {"steps": 8, "batch": 4, "sequence_length": 16, "save_steps": 3, "precision": "float32", "learning_rate": 1e-3}


@pytest.fixture
def options(text):
    return RUN | {"data": (text,)}


class Killed(BaseException):
    pass


def killed_at(step):
    """A progress callback that ends the process, as far as a test can, after a step is done."""

    def progress(stage, done, total, note=""):
        if stage == "training" and done == step:
            raise Killed

    return progress


def losses(run, kind="loss"):
    return [row[kind] for row in read_curve(run)]


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
    assert "not trained" not in card and (run / "model" / "model.safetensors").stat().st_mode & 0o044
    assert "for 60 steps, 3,840 tokens of" in card and ("calibrat" in card) is (which == "converted")


def test_a_killed_run_that_is_resumed_is_the_same(converted, options, other_text, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    measured = options | {"held_out": other_text, "held_out_steps": 2}
    heal(converted, whole, **measured)
    for step in (2, 5, 7):
        with pytest.raises(Killed):
            heal(converted, broken, resume=True, progress=killed_at(step), **measured)
    result = heal(converted, broken, resume=True, **measured)
    assert result.resumed_from == 6
    assert losses(broken) == losses(whole)
    assert (broken / "held_out.jsonl").read_text() == (whole / "held_out.jsonl").read_text()
    expected = weights_of(whole / "model")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(broken / "model").items())


def test_an_interrupted_run_says_how_to_go_on(converted, options, tmp_path):
    def interrupted(step):
        def progress(stage, done, total, note=""):
            if stage == "training" and done == step:
                raise KeyboardInterrupt

        return progress

    for step, note in ((1, "has no checkpoint yet"), (5, "--resume goes on after step 3")):
        with pytest.raises(KeyboardInterrupt) as interrupt:
            heal(converted, tmp_path / "run", overwrite=True, progress=interrupted(step), **options)
        assert note in interrupt.value.__notes__[0]


def test_a_finished_run_is_not_run_again(converted, options, tmp_path):
    run = tmp_path / "run"
    first = heal(converted, run, **options)
    again = heal(converted, run, resume=True, progress=killed_at(1), **options)
    assert again == first


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
    assert losses(taught)[0] == losses(taught, "objective")[0] == pytest.approx(losses(alone)[0], abs=1e-5)
    assert losses(taught)[-1] != losses(alone)[-1]


def test_the_order_follows_from_the_seed(converted, options, tmp_path):
    heal(converted, tmp_path / "zero", **options)
    heal(converted, tmp_path / "one", **options | {"seed": 1})
    assert losses(tmp_path / "zero")[0] != losses(tmp_path / "one")[0]


MISTAKES = {
    "no data": ({"data": ()}, "no training data was given: name a file or a dataset with --data, or default."),
    "missing": ({"data": "gone.txt"}, "cannot read text file gone.txt: No such file or directory."),
    "missing table": ({"data": "gone.jsonl"}, "training data gone.jsonl does not exist: give the path of a file."),
    "twice": ({"data": ("a", "a")}, "data names a source twice: name it once, with a larger weight."),
    "columns": ({"data": ("a", "b", "c"), "column": ("text", "body")}, "2 columns for 3 sources"),
    "share alike": ({"accumulate": 4, "batch": 6}, "accumulate must divide batch, 6, got 4."),
    "low rank": ({"lora_rank": 0}, "lora_rank must be 1 or more, got 0."),
    "no teacher": ({"teacher_top_k": 4}, "teacher_top_k is about a teacher: name one with --teacher."),
    "no states": ({"teacher": "a", "teacher_top_k": 4, "hidden_weight": 1.0}, "teacher_top_k keeps no hidden states"),
    "no text": ({"patience": 2}, "patience stops by the loss on a held-out text: name one with --held-out."),
    "trained on": ({"data": ("a",), "held_out": "a"}, "held_out is a, which is trained on: name another text."),
    "no goal": ({"held_out": "a", "recover": 0.5}, "recover is a share of the way to a teacher's loss"),
    "too much": ({"held_out": "a", "teacher": "a", "recover": 2.0}, "recover must be above 0 and at most 1, got 2.0."),
    "price": ({"price_per_hour": -1.0}, "price_per_hour must be 0 or more, got -1.0."),
    "both": ({"fsdp": True, "deepspeed": "a.json"}, "fsdp and deepspeed were both given"),
    "no GPU": ({"fsdp": True}, "shard over GPUs, of which PyTorch sees none"),
    "too long": ({"sequence_length": 65}, "sequence_length is 65, the model has 64 positions: give fewer."),
    "warm-up": ({"warmup": 0.7, "decay": 0.5}, "warmup and decay are 0.7 and 0.5 of the steps: more than all."),
    "rate": ({"learning_rate": 0.0}, "learning_rate must be a positive number, got 0.0."),
    "text": ({"learning_rate": "1e-3"}, "learning_rate must be a number, got '1e-3': write it with a point"),
    "half": ({"steps": 1.5}, "steps must be a whole number, got 1.5."),
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
    assert "has learning_rate 0.001, not 0.1" in one_line(error)
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


def test_low_rank_updates_move_the_attention_alone_and_are_merged(converted, options, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    lora = options | {"trains": "lora", "lora_rank": 2, "learning_rate": 0.01}
    result = heal(converted, whole, **lora)
    before, after = weights_of(converted), weights_of(whole / "model")
    assert list(before) == list(after)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved and all("self_attn" in name for name in moved)
    for name in moved:
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-4) <= 2
    assert weights_of(whole / "checkpoint-8").keys() == after.keys()
    with pytest.raises(Killed):
        heal(converted, broken, progress=killed_at(5), **lora)
    assert heal(converted, broken, resume=True, **lora).resumed_from == 3
    assert losses(broken) == losses(whole) and result.last_loss == losses(whole)[-1]


def test_all_of_a_teachers_tokens_on_disk_are_as_good_as_the_teacher(original, converted, options, tmp_path):
    taught = options | {"teacher": str(original), "temperature": 2.0}
    heal(converted, tmp_path / "live", **taught)
    heal(converted, tmp_path / "kept", **taught | {"teacher_top_k": 32})
    for kind in ("loss", "objective"):
        kept, live = (losses(tmp_path / name, kind) for name in ("kept", "live"))
        torch.testing.assert_close(kept, live, rtol=1e-4, atol=1e-5)
    files = sorted((tmp_path / "cache").rglob("log_p.bin"))
    times = [file.stat().st_mtime_ns for file in files]
    heal(converted, tmp_path / "again", **taught | {"teacher_top_k": 32})
    assert times == [file.stat().st_mtime_ns for file in sorted((tmp_path / "cache").rglob("log_p.bin"))]
    heal(converted, tmp_path / "few", **taught | {"teacher_top_k": 4})
    assert losses(tmp_path / "few", "objective")[0] < losses(tmp_path / "live", "objective")[0]


def test_a_students_own_hidden_states_cost_nothing(original, converted, options, tmp_path):
    for name, source, weight in (("alone", original, 0.0), ("same", original, 9.0), ("other", converted, 9.0)):
        settings = options | {"teacher": str(original), "distill_weight": 0.0, "hidden_weight": weight}
        heal(source, tmp_path / name, **settings)
    for name, gap in (("same", 0.0), ("other", 0.1)):
        distance = losses(tmp_path / name, "objective")[0] - losses(tmp_path / name)[0]
        assert distance == pytest.approx(gap, abs=1e-4) if gap == 0 else distance > gap


def test_the_loss_on_a_held_out_text_is_that_of_the_model(converted, options, other_text, tmp_path):
    measured = options | {"held_out": other_text, "held_out_steps": 4, "held_out_windows": 5}
    result = heal(converted, tmp_path / "run", **measured)
    rows = read_curve(tmp_path / "run", "held_out.jsonl")
    assert [row["step"] for row in rows] == [0, 4, 8] and result.held_out == (rows[0]["loss"], rows[-1]["loss"])
    network, tokenizer = kvfold.load_model(converted)
    ids = torch.tensor(tokenizer(Path(other_text).read_text(), add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        windows = ids[: 5 * 16].view(5, 16)
        expected = network(windows, labels=windows).loss
    assert rows[0]["loss"] == pytest.approx(float(expected), abs=1e-4)


def test_a_run_stops_early_and_stays_stopped(converted, original, options, other_text, tmp_path):
    stops = options | {"steps": 60, "learning_rate": 0.01, "held_out": other_text, "held_out_steps": 3}
    result = heal(converted, tmp_path / "share", **stops | {"teacher": str(original), "recover": 0.1})
    assert 3 <= result.steps < 60 and "10% of the held-out loss is won back" in result.stopped
    assert "Stopped early" in (tmp_path / "share" / "model" / "README.md").read_text()
    patient = stops | {"learning_rate": 1e-12, "patience": 2}
    whole = heal(converted, tmp_path / "patient", **patient)
    assert whole.steps <= 9 and "has not fallen in 2 measurement(s)" in whole.stopped
    (tmp_path / "patient" / "model").rename(tmp_path / "before")
    again = heal(converted, tmp_path / "patient", resume=True, **patient)
    assert again.steps == whole.steps and again.stopped == whole.stopped
    expected = weights_of(tmp_path / "before")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(again.out / "model").items())


def test_a_teacher_must_fit(converted, options, save_tiny, tokenizer, tmp_path, one_line):
    other = save_tiny("other", hidden_size=16)
    with pytest.raises(KvfoldError) as error:
        heal(converted, tmp_path / "run", **options | {"teacher": str(other), "hidden_weight": 1.0})
    assert "has 2 layers of width 16, the model 2 of 32: hidden_weight needs the same." in one_line(error)
    tokenizer.add_tokens("new")
    tokenizer.save_pretrained(other)
    with pytest.raises(KvfoldError) as error:
        heal(converted, tmp_path / "run", **options | {"teacher": str(other)})
    assert "has another vocabulary than the model" in one_line(error)
    assert not (tmp_path / "run").exists()


def test_no_room_for_a_teachers_tokens_is_told_before_it_is_asked(original, converted, options, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(KvfoldError, match="take a smaller teacher_top_k"):
        heal(converted, tmp_path / "run", **options | {"teacher": str(original), "teacher_top_k": 8})
    assert not list((tmp_path / "cache" / "kvfold" / "teachers").iterdir())


def test_two_runs_cannot_write_the_same_folder(converted, options, tmp_path, one_line):
    def second(stage, done, total, note=""):
        if stage == "training" and done == 2:
            with pytest.raises(KvfoldError) as error:
                heal(converted, tmp_path / "run", overwrite=True, **options)
            assert "another process is writing" in one_line(error)

    heal(converted, tmp_path / "run", progress=second, **options)
    assert len(losses(tmp_path / "run")) == 8 and not list(tmp_path.glob(".run*"))


FLIPPED = "as many bytes, and others"
DAMAGE = {
    "weights cut off": ("checkpoint-6/model.safetensors", "x", "checkpoint-6/model.safetensors is missing or damaged"),
    "no optimiser": ("checkpoint-6/optimizer.pt", None, "checkpoint-6/optimizer.pt is missing or damaged: remove the"),
    "no list of files": ("checkpoint-6/files.json", None, "checkpoint-6/files.json is missing or damaged"),
    "other bytes": (
        "checkpoint-6/trainer_state.json",
        FLIPPED,
        "checkpoint-6/trainer_state.json is missing or damaged",
    ),
    "curve cut off": ("curve.jsonl", "", "curve.jsonl lacks some of the 6 steps of checkpoint-6: start anew"),
    "no measurements": ("held_out.jsonl", None, "held_out.jsonl lacks its first measurement: start anew"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_not_gone_on_from(name, converted, options, other_text, tmp_path, one_line):
    run, options = tmp_path / "run", options | {"held_out": other_text}
    with pytest.raises(Killed):
        heal(converted, run, progress=killed_at(7), **options)
    file, content, expected = DAMAGE[name]
    before = (run / file).read_bytes()
    (run / file).unlink()
    if content is FLIPPED:
        (run / file).write_bytes(bytes(byte ^ 255 for byte in before))
    elif content is not None:
        (run / file).write_text(content)
    with pytest.raises(KvfoldError) as error:
        heal(converted, run, resume=True, **options)
    assert expected in one_line(error)
    if file.startswith("checkpoint"):
        shutil.rmtree(run / "checkpoint-6")
        assert heal(converted, run, resume=True, **options).resumed_from == 3


def test_a_run_that_was_killed_while_it_stopped_early_goes_on(original, options, other_text, tmp_path):
    """Its last measurement is beyond its last checkpoint."""
    stopping = {"save_steps": 1, "held_out": other_text, "held_out_steps": 2, "patience": 1, "learning_rate": 5.0}
    result = heal(original, tmp_path / "run", **options | stopping)
    assert result.stopped is not None and 1 < result.steps < 8
    expected = weights_of(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / f"checkpoint-{result.steps}")
    again = heal(original, tmp_path / "run", **options | stopping, resume=True)
    assert (again.steps, again.resumed_from) == (result.steps, result.steps - 1)
    for name, weight in weights_of(tmp_path / "run" / "model").items():
        assert torch.equal(weight, expected[name])


@pytest.mark.parametrize("what", ["data", "teacher"])
def test_other_content_under_the_same_name_is_refused_on_resume(what, original, options, save_tiny, tmp_path, one_line):
    teacher = save_tiny("teacher")
    with pytest.raises(Killed):
        heal(original, tmp_path / "run", **options, teacher=str(teacher), progress=killed_at(4))
    if what == "data":
        path = Path(options["data"][0])
        path.write_text(path.read_text()[::-1])
    else:
        network, _ = kvfold.load_model(teacher)
        network.lm_head.weight.data *= 2
        network.save_pretrained(teacher)
    with pytest.raises(KvfoldError) as error:
        heal(original, tmp_path / "run", **options, teacher=str(teacher), resume=True)
    assert "is not what the run in" in one_line(error)


def test_overwriting_leaves_the_old_run_or_the_new_one(original, options, tmp_path, monkeypatch):
    run = tmp_path / "run"
    heal(original, run, **options)

    def killed(*_):
        raise Killed

    monkeypatch.setattr("kvfold.checkpoint.renaming.replace_folder", killed)
    with pytest.raises(Killed):
        heal(original, run, overwrite=True, **options)
    monkeypatch.undo()
    assert heal(original, run, resume=True, **options).steps == 8


def test_a_damaged_result_or_curve_is_told(original, options, tmp_path, one_line):
    run = tmp_path / "run"
    heal(original, run, **options)
    (run / "result.json").write_text("{}")
    with pytest.raises(KvfoldError) as error:
        heal(original, run, **options, resume=True)
    assert "result.json is damaged" in one_line(error)
    for row in ("5", "{}", '{"step": 9, "tokens": 1, "loss": NaN}'):
        with (run / "curve.jsonl").open("a") as curve:
            curve.write(row + "\n")
        with pytest.raises(KvfoldError) as error:
            read_curve(run)
        assert "line 9 of the curve" in one_line(error)


def test_weights_that_are_no_numbers_in_the_end_are_no_model(original, options, tmp_path, one_line):
    with pytest.raises(KvfoldError) as error:
        heal(original, tmp_path / "run", **options | {"steps": 1, "learning_rate": 1e38, "warmup": 0.0, "decay": 0.0})
    assert "not finite after the last step" in one_line(error)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("what", ["data", "teacher", "model"])
def test_what_a_run_reads_is_not_thrown_away_with_the_run_before(what, original, options, tmp_path, one_line):
    run = tmp_path / "run"
    heal(original, run, **options)
    changes = {
        "data": {"data": (str(shutil.copy(options["data"][0], run)),)},
        "teacher": {"teacher": str(run / "model")},
    }
    source = run / "model" if what == "model" else original
    with pytest.raises(KvfoldError) as error:
        heal(source, run, **options | changes.get(what, {}), overwrite=True)
    assert "which the run reads; give another folder" in one_line(error)
    assert kvfold.load_model(run / "model")


def test_the_held_out_text_is_known_by_any_spelling(original, options, tmp_path, one_line):
    path = Path(options["data"][0])
    with pytest.raises(KvfoldError) as error:
        heal(original, tmp_path / "run", **options, held_out=f"{path.parent}/./{path.name}")
    assert "which is trained on" in one_line(error)
