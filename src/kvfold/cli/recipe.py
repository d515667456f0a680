"""What a recipe (`--config FILE`) needs beyond the parser: flags win over it, and all its values are checked."""

from argparse import _StoreAction

from jsonargparse import ArgumentParser, Namespace

from kvfold.errors import OptionError


def recipe_first(argv: list[str]) -> list[str]:
    """`argv` with the recipe in front: the parser lets the later one win, but a flag must win wherever it stands."""
    first, rest = [], []
    position = 0
    while position < len(argv):
        # A last --config without its value stays last, where the parser reports it.
        taken = 2 if argv[position] == "--config" and position + 1 < len(argv) else 1
        words = argv[position : position + taken]
        (first if taken == 2 or words[0].startswith("--config=") else rest).extend(words)
        position += taken
    return first + rest


def check_values(options: Namespace, parser: ArgumentParser) -> None:
    """Check what the parser takes from a recipe as it is: switches and lists of texts.

    Raises:
        OptionError: a switch that is not true or false, or a list that is not a list of texts.
    """
    for action in parser._actions:
        value = options.get(action.dest)
        if action.nargs == 0 and action.default is False and not isinstance(value, bool):
            raise OptionError(f"the recipe entry {action.dest!r} must be true or false, not {value!r}")
        texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
        # A list with a type is another action of the parser, which checks its items.
        if action.nargs == "+" and isinstance(action, _StoreAction) and value is not None and not texts:
            raise OptionError(f"the recipe entry {action.dest!r} must be a list of texts, not {value!r}")
