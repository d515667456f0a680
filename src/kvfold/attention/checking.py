"""Types of spec fields, checked by value: specs are read from JSON that anyone may have edited."""

from typing import Any

from kvfold.errors import OptionError


def check_field(kind: str, name: str, expected: Any, value: Any, minimum: int) -> None:
    """Refuse `value` where the field `name`, annotated as `expected`, cannot hold it.

    Raises:
        OptionError: wrong type, or a number below `minimum` (floats: not above zero).
    """
    if expected is bool:
        if not isinstance(value, bool):
            raise OptionError(f"{kind} attention: {name} must be true or false, got {value!r}.")
    elif expected is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise OptionError(f"{kind} attention: {name} must be a number above 0, got {value!r}.")
    elif expected is int or value is not None:  # else an optional number that is absent
        _check_integer(kind, name, value, minimum)


def _check_integer(kind: str, name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise OptionError(f"{kind} attention: {name} must be an integer of at least {minimum}, got {value!r}.")
