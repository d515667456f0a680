"""Types of options, checked by value: they come from YAML and from callers."""

from dataclasses import fields
from typing import Any, get_args, get_origin

from kvfold.errors import OptionError

WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_types(options: Any) -> None:
    """Refuse a dataclass with a field that is not of its type; None where the type allows it, tuples unchecked.

    Raises:
        OptionError: the first field that does not fit.
    """
    for field in fields(options):
        if get_origin(field.type) is tuple:
            continue
        value, kinds = getattr(options, field.name), get_args(field.type) or (field.type,)
        kind: Any = next((kind for kind in kinds if kind in WANTED), None)
        if kind is None or (value is None and type(None) in kinds) or _is(value, kind):
            continue
        # YAML reads 1e-3 as text, for want of a point.
        hint = ": write it with a point, as in 1.0e-3" if kind is float and isinstance(value, str) else ""
        raise OptionError(f"{field.name} must be {WANTED[kind]}, got {value!r}{hint}.")


def _is(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)
