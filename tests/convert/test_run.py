"""Whole conversions: what they report, and that they repeat and resume to the byte."""

import hashlib
import json
import multiprocessing
import os
import signal

import pytest
import torch

from kvfold import convert

CALIBRATION = {"calibration_tokens": 128, "calibration_window": 32}
FITS = {
    "one shot": {"one_shot": True},
    "refit": {},
    "polish": {"polish_steps": 3},
    "per layer": {"per_layer": True},
}
STAGES = {
    "one shot": ["rotary", "low rank"],
    "refit": ["rotary", "low rank", "refit"],
    "polish": ["rotary", "low rank", "refit", "polish"],
    "per layer": ["rotary", "low rank", "refit"],
}


def contents(folder):
    """The bytes of every file; of kvfold.json all but the times, the place and where it was resumed from."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    facts = json.loads(files.pop("kvfold.json"))
    for name in ("seconds", "out", "resumed_from"):
        del facts[name]
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}, facts


@pytest.mark.parametrize("fits", FITS)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}])
def test_every_stage_is_reported_and_the_same_seed_gives_the_same_bytes(save_model, text, tmp_path, fits, changes):
    folder = save_model(**changes)
    options = {"cache_ratio": 0.4, "calibration": [text], **CALIBRATION, **FITS[fits]}
    done = convert(folder, tmp_path / "first", **options)
    convert(folder, tmp_path / "second", **options)
    assert list(done.stage_errors) == STAGES[fits]
    assert list(done.stage_losses) == ["original", *STAGES[fits]]
    assert all(len(errors) == 3 and all(0 <= error < 2 for error in errors) for errors in done.stage_errors.values())
    assert all(0 < loss < 20 for loss in done.stage_losses.values())
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    _, facts = contents(tmp_path / "first")
    assert (facts["stage_errors"], facts["stage_losses"]) == (done.stage_errors, done.stage_losses)
    assert done.resumed_from is None
    table = [line for line in (tmp_path / "first/README.md").read_text().splitlines() if line.startswith("| ")]
    rows = {cells[1]: cells[2:-1] for cells in ([cell.strip() for cell in line.split("|")] for line in table)}
    assert list(rows)[-len(STAGES[fits]) - 1 :] == ["original", *STAGES[fits]]
    for stage in STAGES[fits]:
        loss, errors = done.stage_losses[stage], done.stage_errors[stage]
        assert rows[stage] == [
            f"{loss:.3f}",
            f"{loss - done.stage_losses['original']:+.3f}",
            f"{sum(errors) / 3:.3f}, {max(errors):.3f} (layer {errors.index(max(errors))})",
        ]


def test_weights_alone_report_no_stages(save_model, tmp_path):
    done = convert(save_model(), tmp_path / "out", cache_ratio=0.4, calibration_tokens=0)
    assert done.stage_errors == done.stage_losses == {}
    assert "Nothing was measured" in (tmp_path / "out/README.md").read_text()


def test_another_seed_polishes_otherwise(save_model, text, tmp_path, monkeypatch):
    folder = save_model()
    options = {"cache_ratio": 0.4, "calibration": [text], "calibration_tokens": 256, "calibration_window": 32}
    monkeypatch.setitem(polish_globals(), "BATCH_TOKENS", 64)  # a part of the windows a step
    for seed in (0, 1):
        convert(folder, tmp_path / f"seed{seed}", polish_steps=3, seed=seed, **options)
        convert(folder, tmp_path / f"refit{seed}", seed=seed, **options)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("seed0", "seed1", "refit0")}
    assert len(set(weights.values())) == 3
    assert (tmp_path / "refit1/model.safetensors").read_bytes() == weights["refit0"]


def polish_globals():
    from kvfold.convert.polish import polish

    return polish.__globals__


def test_a_time_becomes_steps_that_the_recipe_repeats(save_model, text, tmp_path):
    folder = save_model()
    options = {"cache_ratio": 0.4, "calibration": [text], **CALIBRATION}
    done = convert(folder, tmp_path / "first", polish_minutes=0.002, **options)
    assert done.options.polish_minutes == 0 < done.options.polish_steps
    again = convert(folder, tmp_path / "again", polish_steps=done.options.polish_steps, **options)
    assert contents(tmp_path / "first") == contents(tmp_path / "again")
    assert again.stage_losses == done.stage_losses


def _convert_until(layer, arguments, options):
    """In a process of its own: convert, and die without a word after `layer` layers."""

    def progress(stage, done, total):
        if stage == "converting layers" and done == layer:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    convert(*arguments, progress=progress, **options)


RESUMED = {
    "one shot": {"cache_ratio": 0.4, "one_shot": True},
    "refit": {"cache_ratio": 0.4},
    "weights alone": {"cache_ratio": 0.4, "calibration_tokens": 0},
    "per_head": {"cache_ratio": 0.4, "layout": "per_head", "factorize": "svd_whitened"},
}


@pytest.mark.parametrize("method", RESUMED)
def test_a_killed_conversion_resumes_with_the_same_result(save_model, text, tmp_path, method):
    """Killed after each layer in turn, also when it had been resumed already."""
    folder = save_model(attention_bias=True)
    options = {"calibration": [text], **CALIBRATION} | RESUMED[method]
    convert(folder, tmp_path / "whole", **options)
    out = tmp_path / "out"
    for layer in (1, 2, 3):
        process = multiprocessing.get_context("fork").Process(
            target=_convert_until, args=(layer, (folder, out), options)
        )
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert not out.exists()
    done = convert(folder, out, **options)
    assert done.resumed_from == "layer 2"
    assert contents(out) == contents(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()


def test_a_journal_of_other_options_is_not_taken(save_model, text, tmp_path):
    folder, out = save_model(), tmp_path / "out"
    options = {"calibration": [text], **CALIBRATION}
    process = multiprocessing.get_context("fork").Process(
        target=_convert_until, args=(2, (folder, out), options | {"cache_ratio": 0.4})
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    done = convert(folder, out, cache_ratio=0.5, **options)
    assert done.resumed_from is None
    convert(folder, tmp_path / "whole", cache_ratio=0.5, **options)
    assert contents(out) == contents(tmp_path / "whole")
