"""Sweeps: paired runs, results over seeds, going on after kill -9, and recipes that cannot be."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from kvfold.cli import main as cli
from kvfold.errors import KvfoldError
from kvfold.lab import ablate, read_sweep, summarise
from kvfold.lab.ablate import commands
from kvfold.lab.summary import difference_curves, loss_curves, spread
from kvfold.train.curve import read_curve

from .conftest import TINY, TRAIN

VARIANTS = {"MHA": {"attention": "mha"}, "GLA-2": {"attention": "gla"}, "GQA 2": {"attention": "gqa"}}
MODEL = {name: value for name, value in TINY.items() if name != "vocab_size"} | {"num_key_value_heads": 2}


@pytest.fixture
def write(tmp_path, text, other_text):
    """Writes a recipe with changes."""

    def recipe(name="recipe.yaml", **changes):
        train = TRAIN | {"data": [text], "held_out": other_text}
        content = {
            "model": MODEL | {"vocab_size": 264},
            "variants": VARIANTS,
            "match": {"reference": "MHA", "multiple_of": 1, "tolerance": 0.01},
            "train": train,
            "seeds": [0, 1],
        }
        path = tmp_path / name
        path.write_text(yaml.safe_dump(content | changes, sort_keys=False))
        return path

    return recipe


def losses(out, name):
    return [row["loss"] for row in read_curve(out / name)]


def test_a_sweep_is_paired_and_told_over_its_seeds(write, tmp_path):
    recipe, out = write(), tmp_path / "sweep"
    result = ablate(recipe, out)
    assert [row["name"] for row in result["variants"]] == ["MHA", "GLA-2", "GQA 2"]
    assert [row["variants"] for row in result["differences"]] == [["GLA-2", "MHA"], ["GQA 2", "MHA"]]
    for row in result["differences"]:
        one, other = (dict(zip((0, 1), v["loss"]["values"], strict=True)) for v in find(result, *row["variants"]))
        assert row["loss"] == spread([one[seed] - other[seed] for seed in (0, 1)])
    assert json.loads((out / "summary.json").read_text())["variants"] == result["variants"]
    sweep = read_sweep(recipe)
    curves = difference_curves(sweep, out, "tokens")
    assert curves[0]["x"][-1] == 8 * 4 * 16 and len(curves[0]["differences"]) == 2
    expected = [a - b for a, b in zip(losses(out, "GLA-2/seed-1"), losses(out, "MHA/seed-1"), strict=True)]
    assert curves[0]["differences"][1] == expected
    assert len(loss_curves(sweep, out, "step")) == 3


def find(result, *names):
    return [next(row for row in result["variants"] if row["name"] == name) for name in names]


def test_finished_runs_are_left_alone_and_several_go_at_once(write, tmp_path):
    recipe, one, two = write(), tmp_path / "one", tmp_path / "two"
    ablate(recipe, one, only=["MHA/seed-0"])
    before = (one / "MHA/seed-0/curve.jsonl").stat().st_mtime_ns
    assert [len(row["seeds"]) for row in summarise(read_sweep(recipe), one)["variants"]] == [1, 0, 0]
    ablate(recipe, one)
    assert (one / "MHA/seed-0/curve.jsonl").stat().st_mtime_ns == before
    told = []
    ablate(recipe, two, workers=2, progress=lambda stage, done, total, note="": told.append((stage, done)))
    assert ("GQA 2/seed-1: training", 8) in told
    for cell in read_sweep(recipe).cells():
        assert losses(one, cell.name) == pytest.approx(losses(two, cell.name), abs=1e-6)


def test_a_sweep_that_was_killed_goes_on(write, tmp_path, text):
    long = TRAIN | {"data": [text], "steps": 40}
    recipe = write(train=long, variants={"MHA": VARIANTS["MHA"]}, match={})
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ablate(recipe, whole)
    command = [sys.executable, "-m", "kvfold.cli.main", "ablate", str(broken), "--config", str(recipe)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(broken.glob("MHA/seed-0/checkpoint-[1-9]*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    ablate(recipe, broken)
    assert losses(broken, "MHA/seed-0") == losses(whole, "MHA/seed-0")


def test_a_folder_holds_one_sweep(write, tmp_path, one_line):
    out = tmp_path / "sweep"
    ablate(write(), out, only=["MHA/seed-0"])
    with pytest.raises(KvfoldError) as error:
        ablate(write("other.yaml", seeds=[0]), out)
    assert "holds the runs of another recipe" in one_line(error)


def test_a_recipe_that_never_began_can_be_mended(write, tmp_path):
    out, missing = tmp_path / "sweep", TRAIN | {"data": ["nothing.txt"]}
    with pytest.raises(KvfoldError):
        ablate(write(train=missing), out, only=["MHA/seed-0"])
    ablate(write("mended.yaml"), out, only=["MHA/seed-0"])
    assert losses(out, "MHA/seed-0")


def test_runs_of_one_sweep_are_of_one_text(write, tmp_path, text, one_line):
    recipe, out = write(), tmp_path / "sweep"
    ablate(recipe, out, only=["MHA/seed-0"])
    Path(text).write_text(Path(text).read_text()[::-1])
    with pytest.raises(KvfoldError) as error:
        ablate(recipe, out)
    assert "is of another model" in one_line(error) or "is not what the run in" in one_line(error)


def test_a_folder_of_something_else_is_left_alone(write, tmp_path, one_line):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").touch()
    with pytest.raises(KvfoldError) as error:
        ablate(write(), tmp_path / "other")
    assert "holds something else" in one_line(error)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["a"]


def test_a_worker_ends_with_its_parent(tmp_path):
    child = "import os; from kvfold.lab.ablate import _end_with; print('up', flush=True); _end_with(os.getppid())"
    script = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid); p.wait()"
    parent = subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    told = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    (pid,) = (int(line) for line in told if line.isdecimal())
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1][:3]:
            return
        time.sleep(0.1)
    raise AssertionError("the worker goes on")


def test_one_command_a_run(write, tmp_path):
    lines = commands(write(), tmp_path / "out")
    assert len(lines) == 6 and lines[0].endswith("--only MHA/seed-0") and lines[-1].endswith("'GQA 2/seed-1'")


MISTAKES = {
    "entry": ({"sedes": [1]}, "unknown entry of a sweep 'sedes'. Did you mean 'seeds'?"),
    "no variants": ({"variants": {}}, "the recipe has no variants"),
    "variant": ({"variants": {"a": {"attention": "mha", "head": 3}}}, "variant a: unknown option of a model 'head'"),
    "name": ({"variants": {"a/b": {"attention": "mha"}}}, "'a/b' cannot name a folder"),
    "dots": ({"variants": {"..": {"attention": "mha"}}}, "'..' cannot name a folder"),
    "long": ({"variants": {"a" * 300: {"attention": "mha"}}}, "cannot name a folder"),
    "form": ({"variants": {"a": "mha"}}, "the variant a must hold entries like attention: gqa, got 'mha'."),
    "reference": ({"match": {"multiple_of": 2}}, "match has no reference: name one of MHA, GLA-2, GQA 2."),
    "no text": ({"match": {"reference": ["MHA"]}}, "unknown reference ['MHA']"),
    "number": ({"train": {"data": ["a"], 5: 1}}, "unknown recipe key 5"),
    "data": ({"train": {"data": 5}}, "data must be a text or a list of texts, got 5."),
    "weights": ({"train": {"data": ["a"], "data_weights": ["x"]}}, "data_weights must be a list of numbers"),
    "heads": ({"variants": {"a": {"attention": "mha", "num_attention_heads": 3}}}, "hidden_size must be a multiple of"),
    "std": (
        {"variants": {"a": {"attention": "mha", "init_std": 2.0}}},
        "init_std must be a number above 0 and up to 1",
    ),
    "huge": ({"train": {"data": ["a"], "steps": 10**12}}, "are more than 200,000,000 sequences"),
    "colour": ({"colours": {"MHA": "mauve"}}, "unknown colour 'mauve'"),
    "coloured": ({"colours": {"MQA": "blue"}}, "unknown variant or difference to colour 'MQA'"),
    "who": ({"match": {"reference": "MQA"}}, "unknown reference 'MQA'"),
    "off": ({"match": {"reference": "MHA", "multiple_of": 64}}, "cannot be matched by intermediate_size"),
    "step": ({"match": {"reference": "MHA", "multiple_of": "8"}}, "multiple_of must be a whole number"),
    "solve": ({"match": {"reference": "MHA", "solve": "width"}}, "unknown number to solve for 'width'"),
    "train": ({"train": {"data": ["a"], "bach": 3}}, "unknown recipe key 'bach'. Did you mean 'batch'?"),
    "model": ({"train": {"data": ["a"], "head_dim": 3}}, "train has head_dim, which is about the model"),
    "seed": ({"train": {"data": ["a"], "seed": 3}}, "train has a seed: list all under seeds."),
    "no seeds": ({"seeds": []}, "seeds must be a list of whole numbers of 0 or more, got []."),
    "twice": ({"seeds": [1, 1]}, "seeds has one twice: [1, 1]."),
    "pair": ({"differences": {"a": ["MHA"]}}, "the difference a must be two variants, [one, other], got ['MHA']."),
    "pair of": ({"differences": {"a": ["MHA", "MLA"]}}, "unknown variant 'MLA'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_recipes_that_cannot_be(name, write, one_line):
    changes, expected = MISTAKES[name]
    with pytest.raises(KvfoldError) as error:
        read_sweep(write(**changes))
    assert expected in one_line(error)


def test_files_that_are_no_recipes(tmp_path, one_line):
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "twice.yaml").write_text("seeds: [0]\nseeds: [1]\n")
    for name, expected in (
        ("gone.yaml", "cannot read"),
        ("list.yaml", "must hold"),
        ("broken.yaml", "cannot read"),
        ("twice.yaml", "'seeds' is there twice"),
    ):
        with pytest.raises(KvfoldError) as error:
            read_sweep(tmp_path / name)
        assert expected in one_line(error)


def test_runs_that_are_not_there(write, tmp_path, one_line):
    for arguments, expected in (({"only": ["MHA/seed-7"]}, "unknown run"), ({"workers": 0}, "workers must be 1")):
        with pytest.raises(KvfoldError) as error:
            ablate(write(), tmp_path / "out", **arguments)
        assert expected in one_line(error)


def test_a_sweep_is_drawn_and_told(write, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write(differences={"GLA": ["GLA-2", "MHA"]}, colours={"GLA": "blue"}, title="Tiny")
    assert cli.main(["match", str(recipe)]) == 0
    assert "GQA 2" in capsys.readouterr().out
    assert cli.main(["ablate", "sweep", "--config", str(recipe), "--list"]) == 0
    assert capsys.readouterr().out.count("kvfold ablate") == 6
    assert cli.main(["ablate", "sweep", "--config", str(recipe)]) == 0
    assert "GLA-2 – MHA" in capsys.readouterr().out
    assert cli.main(["plot", "sweep", "--x", "tokens"]) == 0
    assert "figure: differences.png" in capsys.readouterr().out
    assert cli.main(["plot", "sweep", "--losses", "--log", "--out", "losses.svg"]) == 0
    assert (tmp_path / "differences.png").stat().st_size > 10_000 and (tmp_path / "losses.svg").exists()
    capsys.readouterr()
    assert cli.main(["plot", "sweep", "--held-out"]) == 2
    assert cli.main(["plot", "sweep/MHA/seed-0", "--log"]) == 2
    assert "--log is for the folder of a sweep" in capsys.readouterr().err
