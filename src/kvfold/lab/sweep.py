"""A sweep: several variants of one model, each with several seeds, under matched conditions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvfold.errors import KvfoldError, OptionError, TextError
from kvfold.lab.architecture import Architecture, has_use
from kvfold.lab.matching import TOLERANCE, Match, match
from kvfold.lab.pretrain import Recipe
from kvfold.registry import lookup
from kvfold.train import TrainOptions

KEYS = ("title", "model", "variants", "match", "train", "seeds", "differences", "colours")
MATCH_KEYS = ("reference", "solve", "multiple_of", "tolerance")
NAME = re.compile(r"(?!\.)[\w+.,()=-][\w+.,()= -]{0,99}")
"""Of a variant, which is a folder beside the files of a sweep."""


def run_name(variant: str, seed: int) -> str:
    """Of a run, and its folder in that of the sweep."""
    return f"{variant}/seed-{seed}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    variant: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return run_name(self.variant, self.seed)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a recipe of `kvfold ablate` says.

    Args:
        matches: the variants in their order, sizes solved.
        recipes: how each is trained, by variant; all alike but for the architecture.
        seeds: each is that of the weights and of the order of the text, which is the same for all variants.
        differences: pairs of variants by name: the loss of the first minus that of the second.
        colours: of these in the figure, by name.
        title: of the figure.
    """

    matches: tuple[Match, ...]
    recipes: Mapping[str, Recipe]
    seeds: tuple[int, ...]
    differences: Mapping[str, tuple[str, str]]
    colours: Mapping[str, str]
    title: str

    def cells(self) -> list[Cell]:
        """All runs, seed by seed: what is there early covers every variant."""
        return [
            Cell(variant=name, seed=seed, recipe=replace(recipe, options=replace(recipe.options, seed=seed)))
            for seed in self.seeds
            for name, recipe in self.recipes.items()
        ]

    @property
    def options(self) -> TrainOptions:
        """How all variants are trained; the seed is that of none."""
        return next(iter(self.recipes.values())).options

    def label(self, variant: str) -> str:
        """What a figure says of a variant: heads, cache and size."""
        shape = next(found.architecture for found in self.matches if found.name == variant)
        size = 2 * shape.spec().cached_elements() * shape.num_hidden_layers
        return f"{variant}: {shape.num_attention_heads} heads, {size:,} bytes/token, {shape.parameters() / 1e6:.2f} M"


def read_sweep(path: str | Path) -> Sweep:
    """The sweep of a YAML recipe.

    Raises:
        TextError: the file cannot be read.
        OptionError: it does not say what a sweep needs; the message says which entry and why.
    """
    return sweep_from_dict(_content(path))


def read_matches(path: str | Path) -> tuple[Match, ...]:
    """The variants of a recipe, sizes solved; it need not say how they are trained. Raises as `read_sweep`."""
    return matches_from_dict(_content(path))


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is there twice is a mistake, of which PyYAML keeps the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """As the parent's."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _content(path: str | Path) -> dict[str, Any]:
    try:
        content = yaml.load(Path(path).read_text("utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise TextError(f"cannot read the recipe {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise OptionError(f"the recipe {path} must hold {', '.join(KEYS)}, got {type(content).__name__}.")
    for key in content:
        lookup(dict.fromkeys(KEYS), key, "entry of a sweep")
    return content


def matches_from_dict(content: dict[str, Any]) -> tuple[Match, ...]:
    """What `model`, `variants` and `match` of a recipe give."""
    model, variants, train = (_mapping(content, key) for key in ("model", "variants", "train"))
    if not variants:
        raise OptionError("the recipe has no variants: name some, each with its attention.")
    shapes = {}
    shared = {"max_position_embeddings": train.get("sequence_length", 512)} | model
    for name, own in variants.items():
        if not (isinstance(name, str) and NAME.fullmatch(name)):
            raise OptionError(
                f"the variant {str(name)[:40]!r} cannot name a folder: use letters, digits, + - . , = (up to 100)."
            )
        if not isinstance(own, dict):
            raise OptionError(f"the variant {name} must hold entries like attention: gqa, got {own!r}.")
        try:
            # What all share is for those that have a use for it: the others have no latents, or no groups.
            mine = {key: value for key, value in shared.items() if has_use(str(own.get("attention")), key)}
            shapes[name] = Architecture.from_dict(mine | own)
        except KvfoldError as error:
            raise OptionError(f"variant {name}: {error}") from error
    return tuple(_matched(shapes, _mapping(content, "match")))


def sweep_from_dict(content: dict[str, Any]) -> Sweep:
    """A sweep from the entries of a recipe: `model` has what all variants share, `variants` what each has for itself,
    `match` the arguments of `match` with the name of the reference, `train` the keys of training.

    Raises:
        OptionError: as of `read_sweep`.
    """
    matches, train = matches_from_dict(content), _mapping(content, "train")
    training = set(train) & {field.name for field in fields(Architecture)}
    if training:
        raise OptionError(f"train has {min(training)}, which is about the model: put it under model.")
    if "seed" in train:
        raise OptionError("train has a seed: list all under seeds.")
    recipes = {found.name: Recipe.from_dict(train | found.architecture.to_dict()) for found in matches}
    return Sweep(
        matches=matches,
        recipes=recipes,
        seeds=_seeds(content.get("seeds", [0])),
        differences=_pairs(_mapping(content, "differences"), recipes),
        colours=_colours(_mapping(content, "colours"), content),
        title=str(content.get("title", "")),
    )


def _colours(value: dict[str, Any], content: dict[str, Any]) -> dict[str, str]:
    from kvfold.report.differences import COLOURS  # and with it matplotlib

    drawn = dict.fromkeys((*_mapping(content, "variants"), *_mapping(content, "differences")))
    for name, colour in value.items():
        lookup(drawn, name, "variant or difference to colour")
        lookup(COLOURS, colour, "colour")
    return value


def _mapping(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict):
        raise OptionError(f"{key} must hold entries with names, got {value!r}.")
    return value


def _matched(shapes: dict[str, Architecture], wanted: dict[str, Any]) -> list[Match]:
    """The variants as they are, or with sizes solved."""
    for key in wanted:
        lookup(dict.fromkeys(MATCH_KEYS), key, "entry of match")
    if not wanted:
        goal = next(iter(shapes.values())).parameters()
        return [Match(name=name, architecture=s, error=s.parameters() / goal - 1) for name, s in shapes.items()]
    if "reference" not in wanted:
        raise OptionError(f"match has no reference: name one of {', '.join(shapes)}.")
    reference = wanted["reference"]
    others = {name: shape for name, shape in shapes.items() if name != reference}
    solved = match(
        lookup(shapes, reference, "reference"),
        others,
        solve=wanted.get("solve", "intermediate_size"),
        multiple_of=wanted.get("multiple_of"),
        tolerance=wanted.get("tolerance", TOLERANCE),
    )
    by_name = {found.name: found for found in solved}
    by_name[reference] = Match(name=reference, architecture=shapes[reference], error=0.0)
    return [by_name[name] for name in shapes]


def _seeds(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(seed) is int and seed >= 0 for seed in value):
        raise OptionError(f"seeds must be a list of whole numbers of 0 or more, got {value!r}.")
    if len(set(value)) < len(value):
        raise OptionError(f"seeds has one twice: {value}.")
    return tuple(value)


def _pairs(value: dict[str, Any], variants: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """As given, or, where nothing is, every variant against the first."""
    first, *others = variants
    for name, pair in value.items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise OptionError(f"the difference {name} must be two variants, [one, other], got {pair!r}.")
        for variant in pair:
            lookup(variants, variant, "variant")
    return {str(name): tuple(pair) for name, pair in value.items()} or {name: (name, first) for name in others}
