"""The table of specs, and specs out of JSON."""

from dataclasses import fields
from typing import Any

from kvfold.attention.spec import AttentionSpec, GroupedSpec, LatentSpec, TiedSpec
from kvfold.errors import OptionError
from kvfold.registry import lookup

SPECS: dict[str, type[GroupedSpec] | type[TiedSpec] | type[LatentSpec]] = {
    "grouped": GroupedSpec,
    "tied": TiedSpec,
    "latent": LatentSpec,
}


def spec_from_dict(values: dict[str, Any]) -> AttentionSpec:
    """The inverse of `AttentionSpec.to_dict`; keys are strict.

    Raises:
        OptionError: the kind or a key is unknown, a key is missing, or the shapes contradict each other.
    """
    kind = values.get("kind") if isinstance(values, dict) else values
    if not isinstance(values, dict) or not isinstance(kind, str):
        raise OptionError(f"an attention spec needs a 'kind', one of {', '.join(SPECS)}; got {kind!r}.")
    cls = lookup(SPECS, kind, "attention kind")
    given = {key: value for key, value in values.items() if key != "kind"}
    known = {field.name: field for field in fields(cls)}
    for key in given:
        lookup(known, key, f"field of {kind} attention")
    try:
        return cls(**given)
    except TypeError as error:
        raise OptionError(f"{kind} attention spec is incomplete: {error}.") from error
