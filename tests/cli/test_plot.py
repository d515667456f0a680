"""`kvfold plot`: runs, names, panels and mistakes."""

import json

import pytest

from kvfold.cli import main as cli


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, start in (("base", 3.0), ("healed", 8.0), ("empty", None)):
        (tmp_path / name).mkdir()
        rows = (
            [{"step": step, "tokens": 64 * step, "loss": 2.5 + start / step} for step in range(1, 60)] if start else []
        )
        for file in ("curve.jsonl", "held_out.jsonl"):
            (tmp_path / name / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_runs_are_drawn_and_told(runs, capsys):
    assert cli.main(["plot", "base", "d_kv=8=healed", "--x", "tokens", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in result["curves"]] == ["base", "d_kv=8"]
    assert result["curves"][1]["tokens"] == 59 * 64 and result["curves"][1]["first_loss"] == 10.5
    assert (runs / "losses.png").stat().st_size > 10_000
    assert cli.main(["plot", "base", "--held-out", "--out", "a.svg", "b.html"]) == 0
    assert "figure: a.svg, b.html" in capsys.readouterr().out
    assert sorted(path.name for path in runs.iterdir() if path.is_file()) == ["a.svg", "b.html", "losses.png"]


def test_panels_come_from_a_file(runs, capsys):
    (runs / "figures").mkdir()
    panels = "MHA:\n  baseline: ../base\n  d_kv=8: ../healed\nGQA:\n  baseline: ../base\n"
    (runs / "figures" / "one.yaml").write_text(panels)
    assert cli.main(["plot", "figures/one.yaml"]) == 0
    assert "MHA: d_kv=8" in capsys.readouterr().out


def test_an_equals_sign_may_be_in_names_and_folders(runs, capsys):
    (runs / "base").rename(runs / "d_kv=16")
    assert cli.main(["plot", "d_kv=16", "d_kv=8=healed", "a=d_kv=16", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["curves"]] == ["d_kv=16", "d_kv=8", "a"]


def test_a_run_without_a_held_out_text(runs, capsys):
    (runs / "base" / "held_out.jsonl").unlink()
    assert cli.main(["plot", "base", "--held-out"]) == 2
    assert "the run base was not measured on a held-out text" in capsys.readouterr().err


MISTAKES = {
    "gone": (["gone"], "cannot read the curve gone/curve.jsonl"),
    "empty": (["empty"], "the run empty has no step yet"),
    "twice": (["base", "base"], "two runs are called base"),
    "axis": (["base", "--x", "hours"], "tokens"),
    "format": (["base", "--out", "a.pdf"], ".svg"),
    "smooth": (["base", "--smooth", "2"], "--smooth must be between 0 and 1, got 2.0."),
    "place": (["base", "--out", "gone/a.png"], "cannot write gone/a.png"),
    "no file": (["gone.yaml"], "cannot read the figure gone.yaml"),
    "no panels": (["list.yaml"], "must hold titles of panels"),
    "no runs": (["none.yaml"], "the panel 'a' has no runs"),
    "no panel": (["nothing.yaml"], "nothing.yaml has no panels"),
    "panel twice": (["panels.yaml"], "panels.yaml has 'a' twice"),
    "curve twice": (["curves.yaml"], "curves.yaml has 'b' twice"),
    "title": (["none.yaml", "--title", "a"], "none.yaml gives the titles itself"),
    "no name": (["=base"], "'=base' has no name before the ="),
    "no loss": (["odd"], "line 1 of the curve odd/curve.jsonl is damaged: 5"),
    "no tokens": (["odd", "--held-out", "--x", "tokens"], "line 1 of the curve odd/held_out.jsonl is damaged"),
    "no number": (["diverged"], "line 1 of the curve diverged/curve.jsonl is damaged: {'step': 1, 'loss': nan}"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, runs, capsys):
    (runs / "list.yaml").write_text("- a\n")
    (runs / "none.yaml").write_text("a:\n")
    (runs / "nothing.yaml").write_text("{}\n")
    (runs / "panels.yaml").write_text("a:\n  b: base\na:\n  b: healed\n")
    (runs / "curves.yaml").write_text("a:\n  b: base\n  b: healed\n")
    for folder, file, text in (
        ("odd", "curve.jsonl", "5\n"),
        ("odd", "held_out.jsonl", '{"step": 1, "loss": 3.0}\n'),
        ("diverged", "curve.jsonl", '{"step": 1, "loss": NaN}\n'),
    ):
        (runs / folder).mkdir(exist_ok=True)
        (runs / folder / file).write_text(text)
    arguments, expected = MISTAKES[name]
    assert cli.main(["plot", *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1 and "Traceback" not in error
