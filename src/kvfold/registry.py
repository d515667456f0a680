"""Look-ups in literal tables of names, with an error that suggests the nearest known one."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from kvfold.errors import UnknownNameError

T = TypeVar("T")


def lookup(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return `table[name]`; `kind` says in the error message what the name stands for.

    Raises:
        UnknownNameError: `name` is not in `table`. The message lists the known names and suggests the nearest.
    """
    if isinstance(name, str) and name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(table)}.")
