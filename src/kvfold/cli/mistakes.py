"""Turns the parser's messages into the one line that a user reads."""

import difflib
import re

from jsonargparse import ArgumentParser

_MISSING = re.compile(r"the following arguments are required: (.*)")
_WRONG_TYPE = re.compile(r"Parser key \"(\w+)\"(?: element \d+)?: Expected an? <class '(\w+)'>\. Got value: (.*)")
_UNKNOWN_ENTRY = re.compile(r"(?:Key|Option) '([^']+)' is not (?:accepted|expected)")
_UNKNOWN_ARGUMENT = re.compile(r"unrecognized arguments: (\S+)")
_BAD_RECIPE = re.compile(r"Parser key \"config\": (.*)")
_BAD_YAML = re.compile(r"Problems parsing config: (.*)")
_NO_MAPPING = re.compile(r"Unexpected config:")
_NO_LIST = re.compile(r"'\w+' object is not iterable")
_KINDS = {"int": "a whole number", "float": "a number", "str": "a text"}


def one_line(message: str, parser: ArgumentParser) -> str:
    """The parser's `message` in one line, with the nearest known name where a name was unknown."""
    message = " ".join(message.split())
    if missing := _MISSING.search(message):
        names = ", ".join(_shown(name, parser) for name in missing[1].split(", "))
        return f"missing {names}. See {parser.prog} --help"
    if wrong := _WRONG_TYPE.search(message):
        name, kind, value = wrong.groups()
        return f"{_shown(name, parser)} must be {_KINDS[kind]}, not {value!r}"
    if unknown := _UNKNOWN_ENTRY.search(message):
        known = [action.dest for action in parser._actions if action.dest not in ("help", "config", "print_shtab")]
        names = ", ".join(known)
        return f"the recipe has an unknown entry {unknown[1]!r}.{_nearest(unknown[1], known) or f' Known: {names}.'}"
    if unknown := _UNKNOWN_ARGUMENT.search(message):
        flags = [flag for action in parser._actions for flag in action.option_strings]
        return (
            f"unexpected argument {unknown[1]!r}.{_nearest(unknown[1].split('=')[0], flags)} See {parser.prog} --help"
        )
    if bad := _BAD_RECIPE.search(message):
        return f"the recipe cannot be read: {bad[1]}"
    if bad := _BAD_YAML.search(message):
        return f"the recipe is not valid YAML: {bad[1]}"
    if _NO_MAPPING.search(message):
        return "the recipe must hold entries of the form `name: value`, and at least one"
    if _NO_LIST.search(message):
        lists = ", ".join(action.dest for action in parser._actions if action.nargs == "+")
        return f"a recipe entry that takes a list ({lists}) has a single value: write it in square brackets"
    return f"{message.rstrip('. ')}. See {parser.prog} --help"


def _shown(name: str, parser: ArgumentParser) -> str:
    """`name` as the user writes it: a flag, or the capitals of a positional argument."""
    action = next(action for action in parser._actions if action.dest == name)
    return action.option_strings[-1] if action.option_strings else str(action.metavar)


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
