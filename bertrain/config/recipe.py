"""Recipes: TOML files of settings. A recipe is complete together with the recipe it builds on.

about = "..."         its first line is the headline in `bertrain recipes`
group = "start here"  the heading that `bertrain recipes` lists it under
base = "bert-tiny"    the recipe it builds on, or a .toml file beside this one
[optimizer]           sections of settings, as everywhere
[points.256]          in a recipe of ours, FILE-256: a recipe that builds on the rest of the file
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError, nearest
from bertrain.base.files import read_text

GROUPS = ("start here", "BERT pre-training", "the five systems", "MLPerf reference points")
"""The order in which `bertrain recipes` lists them; the first alone without --all."""
BY_SIZE = (
    "bert-demo", "bert-tiny", "bert-mini", "bert-small", "bert-medium", "bert-base", "bert-large", "modernbert-base",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe as its file has it, without what it builds on."""

    name: str
    settings: dict[str, Any]
    about: str = ""
    group: str = ""
    base: str = ""
    points: tuple[str, ...] = ()  # the recipes of a file of several; the file itself is then only their base

    @property
    def headline(self) -> str:
        return self.about.partition("\n")[0]


def list_recipes() -> list[Recipe]:
    """The recipes that ship with the package, group by group; those to start with by size."""
    recipes = [recipe for recipe in _shipped().values() if not recipe.points]
    places = {name: place for place, name in enumerate((*GROUPS, *BY_SIZE))}
    return sorted(recipes, key=lambda recipe: (places[recipe.group], places.get(recipe.name, len(places))))


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package.

    Example: "bert-small" in bertrain.recipe_names()
    """
    return sorted(recipe.name for recipe in list_recipes())


def load_recipe(name: str) -> list[Recipe]:
    """A recipe, by its name or its .toml file, and the recipes it builds on; the most basic one comes first."""
    recipe = _find(name)
    if recipe.points:
        raise UserError(
            "recipe-of-several", f"{name} stands for several recipes; choose one: {', '.join(recipe.points)}"
        )
    chain = [recipe]
    while chain[0].base:
        base = _find_base(chain[0])
        if base.name in (recipe.name for recipe in chain):
            names = " builds on ".join([*(recipe.name for recipe in reversed(chain)), base.name])
            raise UserError("recipe-cycle", f"{names}: a recipe cannot build on itself; remove one `base`")
        chain.insert(0, base)
    return chain


def read_toml(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and deep nesting
        raise UserError("invalid-toml", f"{origin} is not valid TOML: {error}") from None


@cache
def _shipped() -> dict[str, Recipe]:
    """Every recipe of the package by its name, and the bases of several."""
    recipes: dict[str, Recipe] = {}
    for file in sorted((resources.files("bertrain.config") / "recipes").iterdir(), key=lambda file: file.name):
        name = file.name.removesuffix(".toml")
        content = tomllib.loads(file.read_text())
        points = content.pop("points", {})
        recipes[name] = parent = _parse(name, content, points=tuple(f"{name}-{point}" for point in points))
        for point, settings in points.items():
            about = f"{parent.about}\n{settings.pop('about', '')}".strip().replace("{point}", point)
            full_name = f"{name}-{point}"
            recipes[full_name] = _parse(full_name, settings | {"about": about, "group": parent.group, "base": name})
    return recipes


def _parse(name: str, content: dict[str, Any], points: tuple[str, ...] = ()) -> Recipe:
    described = {key: content.pop(key, "") for key in ("about", "group", "base")}
    for key, value in described.items():
        if not isinstance(value, str):
            raise UserError("invalid-value", f"{name}: {key} must be text, not {value!r}")
    return Recipe(name=name, settings=content, points=points, **described | {"about": described["about"].strip()})


def _find(name: str) -> Recipe:
    if name.endswith(".toml"):
        return _parse(name, read_toml(read_text(Path(name)), name))
    if name not in _shipped():
        suggestion = nearest(name, recipe_names())
        raise UserError(
            "unknown-recipe", f"no recipe {name!r}{suggestion}; see `bertrain recipes --all`, or give a .toml file"
        )
    return _shipped()[name]


def _find_base(recipe: Recipe) -> Recipe:
    """The recipe that another builds on; a file is looked for beside it."""
    base = str(Path(recipe.name).parent / recipe.base) if recipe.base.endswith(".toml") else recipe.base
    try:
        return _find(base)
    except UserError as error:
        if error.code not in ("unknown-recipe", "unreadable-file"):
            raise
        raise UserError("unknown-base", f"{recipe.name} builds on {recipe.base!r}: {error}") from None
