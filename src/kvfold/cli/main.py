"""The entry point `kvfold`: picks the command, runs it, and turns a user's mistake into one line and exit code 2."""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from jsonargparse import ArgumentError, Namespace

from kvfold.cli import (
    ablate,
    compare,
    convert,
    demo,
    doctor,
    evaluate,
    export,
    generate,
    heal,
    inspect,
    match,
    plan,
    plot,
    pretrain,
    serve,
    verify,
)
from kvfold.cli.command import Command
from kvfold.cli.mistakes import one_line
from kvfold.cli.progress import Reporter
from kvfold.cli.recipe import check_values, recipe_first
from kvfold.errors import KvfoldError, OptionError
from kvfold.progress import Progress, silent
from kvfold.registry import lookup

COMMANDS: dict[str, Command] = {
    "inspect": inspect.COMMAND,
    "plan": plan.COMMAND,
    "convert": convert.COMMAND,
    "heal": heal.COMMAND,
    "plot": plot.COMMAND,
    "verify": verify.COMMAND,
    "evaluate": evaluate.COMMAND,
    "compare": compare.COMMAND,
    "generate": generate.COMMAND,
    "match": match.COMMAND,
    "pretrain": pretrain.COMMAND,
    "ablate": ablate.COMMAND,
    "export": export.COMMAND,
    "doctor": doctor.COMMAND,
    "serve": serve.COMMAND,
    "demo": demo.COMMAND,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns 0, 1 if a check failed, 2 after a user's mistake, 130 after Ctrl-C."""
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KvfoldError as error:
        print(f"kvfold: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        notes = getattr(interrupt, "__notes__", [])  # how to go on, where something is kept
        print("; ".join(["kvfold: interrupted", *notes]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RuntimeError as error:
        if "home directory" not in str(error):  # how pathlib says that a ~ stands for nobody
            raise
        print("kvfold: error: a path begins with ~ and the name of no user: write it out", file=sys.stderr)
        return 2
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"kvfold: error: {place}{error.strerror or error}", file=sys.stderr)
        return 2


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code.

    Raises:
        KvfoldError: the user's mistake, in one line.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
    elif argv[0] == "--version":
        print(f"kvfold {version('kvfold')}")
    elif argv[0].startswith("-"):
        raise OptionError(f"unknown option {argv[0]!r}. See kvfold --help")
    else:
        command = lookup(COMMANDS, argv[0], "command")
        options = parse(command, argv[1:])
        quiet_transformers()
        # Some libraries print to stdout while they work; the result must be the only thing there.
        with contextlib.redirect_stdout(sys.stderr), _reporter() as progress:
            result = command.run(options, progress)
        if _is_first_process():
            if options.json:
                print(json.dumps(result))
            else:
                command.show(result)
        return 0 if command.passed(result) else 1
    return 0


def parse(command: Command, argv: list[str]) -> Namespace:
    """The options of one command.

    Raises:
        OptionError: a flag, a value or a recipe that cannot be understood.
    """
    parser = command.parser()
    try:
        options = parser.parse_args(recipe_first(argv))
    except ArgumentError as error:
        raise OptionError(one_line(str(error), parser)) from error
    except OSError as error:
        raise OptionError(f"the recipe cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"the recipe is not UTF-8 (byte {error.start}): give a YAML text file") from error
    check_values(options, parser)
    return options


def _reporter() -> contextlib.AbstractContextManager[Progress]:
    return Reporter() if _is_first_process() else contextlib.nullcontext(silent)


def _is_first_process() -> bool:
    """Whether this process speaks for all that `torchrun` or `accelerate launch` has started."""
    return os.environ.get("RANK", "0") == "0"


def quiet_transformers() -> None:
    """Silence the warnings and bars of transformers: what a user must know is an error of kvfold's own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def overview() -> str:
    """The text of `kvfold --help`."""
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return f"""usage: kvfold COMMAND [arguments]

Fold the key/value cache of a language model into a latent.

commands:
{commands}

options:
  -h, --help  show this text; `kvfold COMMAND --help` explains one command
  --version   show the version

example:
  kvfold convert smollm2 smollm2-mla --cache-ratio 0.3125
  kvfold verify smollm2 smollm2-mla
  kvfold generate smollm2-mla --prompt "The capital of France is\""""


if __name__ == "__main__":
    sys.exit(main())
