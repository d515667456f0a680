"""The command line as a user meets it, with the library behind it replaced by recorders."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from kvfold.cli import main as cli
from kvfold.errors import BudgetError


def replaced(monkeypatch, name, run):
    """Replace what a command runs; its arguments and its parser stay."""
    monkeypatch.setitem(cli.COMMANDS, name, replace(cli.COMMANDS[name], run=run))


def test_the_overview_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)


def test_the_overview_is_shown_without_arguments(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: kvfold COMMAND")


def test_the_help_texts_need_no_plotting():
    script = (
        "import sys\n"
        "from kvfold.cli import main\n"
        "assert all('example:' in command.parser().format_help() for command in main.COMMANDS.values())\n"
        "heavy = {'matplotlib', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_names_and_help_agree(name, capsys):
    command = cli.COMMANDS[name]
    assert command.name == name
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: kvfold {name}")
    assert max(map(len, lines)) <= 120


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvfold 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["conver"], "unknown command 'conver'. Did you mean 'convert'?"),
        (["--frobnicate"], "unknown option '--frobnicate'. See kvfold --help"),
        (["convert", "model"], "missing OUT. See kvfold convert --help"),
        (["evaluate", "model"], "missing --text or --tasks. See kvfold evaluate --help"),
        (["evaluate", "model", "--text", "t", "--limit", "5"], "--limit needs --tasks: name the tasks to score."),
        (["convert", "m", "o", "--cache-ratio", "x"], "--cache-ratio must be a number, not 'x'"),
        (["convert", "m", "o", "--d-kv", "1.5"], "--d-kv must be a whole number, not '1.5'"),
        (
            ["convert", "m", "o", "--cache-rati", "1"],
            "unexpected argument '--cache-rati'. Did you mean '--cache-ratio'?",
        ),
        (["convert", "m", "o", "--cache-ratio"], "argument --cache-ratio: expected one argument."),
        (["convert", "m", "o", "surplus"], "unexpected argument 'surplus'."),
        (["convert", "m", "o", "--config", "none.yaml"], "the recipe cannot be read: File does not exist: "),
        (["convert", "m", "o", "--config"], "argument --config: expected one argument."),
    ],
)
def test_a_wrong_command_line_gets_one_line(argv, message, mistake):
    assert mistake(*argv).startswith(message)


def test_an_error_of_the_library_gets_one_line(monkeypatch, mistake):
    def run(options, progress):
        raise BudgetError("the budget is\ntoo small")

    replaced(monkeypatch, "inspect", run)
    assert mistake("inspect", "model") == "the budget is too small"


def test_a_bug_keeps_its_traceback(monkeypatch):
    def run(options, progress):
        raise ZeroDivisionError

    replaced(monkeypatch, "inspect", run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["inspect", "model"])


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def run(options, progress):
        raise KeyboardInterrupt

    replaced(monkeypatch, "inspect", run)
    assert cli.main(["inspect", "model"]) == 130
    assert capsys.readouterr() == ("", "kvfold: interrupted\n")


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    def run(options, progress):
        interrupt = KeyboardInterrupt()
        interrupt.add_note("run it again")
        raise interrupt

    replaced(monkeypatch, "inspect", run)
    assert cli.main(["inspect", "model"]) == 130
    assert capsys.readouterr() == ("", "kvfold: interrupted; run it again\n")


def test_json_is_all_that_stdout_gets(monkeypatch, capsys):
    def run(options, progress):
        print("a library's own print")
        progress("calibrate", 1, 2)
        progress("calibrate", 2, 2)
        return {"model": options.model}

    replaced(monkeypatch, "inspect", run)
    assert cli.main(["inspect", "some-model", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"model": "some-model"}
    assert printed.err == "a library's own print\ncalibrate ...\n"


def test_progress_is_drawn_on_a_terminal_and_removed_after(monkeypatch, capsys):
    def terminal(file):
        return Console(file=file, force_terminal=True, width=80)

    def run(options, progress):
        progress("factorize", 1, 2)
        return {}

    monkeypatch.setattr("kvfold.cli.progress.Console", terminal)
    replaced(monkeypatch, "inspect", run)
    assert cli.main(["inspect", "some-model", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "{}\n"
    assert "factorize" in printed.err
    assert "1/2" in printed.err
