"""What the thin commands hand to the library, and what they make of its answer."""

import importlib
import json
from dataclasses import fields
from fractions import Fraction
from types import SimpleNamespace

import pytest

from kvfold.cli import main as cli
from kvfold.cli.pretrain import SCHEDULE
from kvfold.cli.training_flags import HEALING
from kvfold.lab.pretrain import DEFAULTS
from kvfold.train import TrainOptions


@pytest.fixture
def record(monkeypatch):
    """Replaces a library function by one that records its call and gives `answer`."""

    def replace(module, name, answer):
        calls = []

        def function(*positional, progress=None, **named):
            calls.append((positional, named))
            return answer

        # The module, not the function of the same name that the package re-exports.
        monkeypatch.setattr(importlib.import_module(module), name, function)
        return calls

    return replace


def result(**values):
    return SimpleNamespace(to_dict=lambda: values)


def printed_json(capsys, *argv):
    assert cli.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect(record, capsys):
    calls = record("kvfold.families", "inspect_model", result(parameters=3))
    assert printed_json(capsys, "inspect", "m") == {"parameters": 3}
    assert calls == [(("m",), {})]


def test_verify(record, capsys):
    calls = record("kvfold.evaluate", "verify", result(kl=0.5, passed=True))
    assert printed_json(capsys, "verify", "m", "o") == {"kl": 0.5, "passed": True}
    assert calls == [(("m", "o"), {})]


def test_a_failed_verification(record, capsys):
    record("kvfold.evaluate", "verify", result(passed=False))
    assert cli.main(["verify", "m", "o", "--json"]) == 1


def test_evaluate(record, capsys):
    calls = record("kvfold.evaluate", "evaluate", result(perplexity=9.5))
    assert printed_json(capsys, "evaluate", "m", "--text", "t.txt", "--windows", "4") == {"perplexity": 9.5}
    tasks = {"tasks": (), "task_folder": None, "limit": None}
    assert calls == [(("m", "t.txt"), {"context": 512, "windows": 4, **tasks})]


def test_compare(record, capsys):
    calls = record("kvfold.evaluate", "compare", result(rows=[]))
    printed = printed_json(
        capsys, "compare", "original=m", "healed=run/model", "--text", "a.txt", "b.txt", "--limit", "3"
    )
    assert printed["rows"] == []
    ((models, texts), options) = calls[0]
    assert models == {"original": "m", "healed": "run/model"} and texts == ["a.txt", "b.txt"]
    assert options == {"context": 512, "windows": 24, "tasks": (), "task_folder": None, "limit": 3}


def test_pretrain(record, capsys):
    calls = record("kvfold.lab", "pretrain", result(steps=3))
    printed_json(capsys, "pretrain", "run", "--attention", "gla", "--hidden-size", "64", "--no-latent-norm", "--resume")
    shape = {"attention": "gla", "hidden_size": 64, "latent_norm": False}
    assert calls == [(("run",), {"resume": True, "overwrite": False, **shape})]


def test_help_tells_the_defaults_in_force():
    defaults = {field.name: field.default for field in fields(TrainOptions)}
    for told, real in ((HEALING, defaults), (SCHEDULE, DEFAULTS)):
        assert told.keys() == DEFAULTS.keys()
        for name, value in told.items():
            numbers = (float(Fraction(value)), real[name]) if name == "decay" else (value, real[name])
            assert numbers[0] == pytest.approx(numbers[1])


def test_export(record, capsys):
    calls = record("kvfold.export", "export", result(runtime="llamacpp"))
    printed_json(capsys, "export", "m", "out.gguf", "--runtime", "llamacpp", "--type", "q8_0")
    options = {"format": None, "runtime": "llamacpp", "type": "q8_0", "approximate": False, "overwrite": False}
    assert calls == [(("m", "out.gguf"), options)]


def test_evaluate_tasks(record, capsys):
    calls = record("kvfold.evaluate", "evaluate", result(perplexity=None))
    printed_json(capsys, "evaluate", "m", "--tasks", "piqa", "mmlu", "--task-folder", "d", "--limit", "9")
    tasks = {"tasks": ["piqa", "mmlu"], "task_folder": "d", "limit": 9}
    assert calls == [(("m", None), {"context": 512, "windows": None, **tasks})]


def test_generate_prints_the_text(record, capsys):
    calls = record("kvfold.evaluate", "generate", " Paris.")
    assert cli.main(["generate", "m", "--prompt", "The capital of France is", "--chat"]) == 0
    assert capsys.readouterr().out == " Paris.\n"
    options = {"max_new_tokens": 64, "temperature": 0.0, "seed": 0, "chat": True}
    assert calls == [(("m", "The capital of France is"), options)]


def test_generate_as_json(record, capsys):
    record("kvfold.evaluate", "generate", "b")
    assert printed_json(capsys, "generate", "m", "--prompt", "a") == {"model": "m", "prompt": "a", "text": "b"}
