"""The commands that describe recipes, settings and this machine."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from bertrain.base.formatting import wrap
from bertrain.cli.options import AsJson, new_app, printed_json
from bertrain.config import recipe as recipe_files
from bertrain.config import resolve as config

app = new_app()


@app.command("recipes")
def recipes(
    name: Annotated[str | None, Argument(help="print this recipe with everything it builds on")] = None,
    show_all: Annotated[bool, Option("--all", help="list every recipe, not only those to start with")] = False,
    as_json: AsJson = False,
) -> None:
    """List recipes, or print one as a TOML file that can be edited.

    Example: bertrain recipes bert-large-phase1
    """
    if name is not None:
        if not printed_json(config.resolve(name).to_dict(), as_json):
            print(config.flatten_recipe(name), end="")
        return
    listed = recipe_files.list_recipes()
    if printed_json({recipe.name: recipe.headline for recipe in listed}, as_json):
        return
    shown = [recipe for recipe in listed if show_all or recipe.group == recipe_files.GROUPS[0]]
    width = max(len(recipe.name) for recipe in shown)
    for group, members in groupby(shown, key=lambda recipe: recipe.group):
        print(f"{group}:")
        for recipe in members:
            print(wrap(f"  {recipe.name:<{width}}  {recipe.headline}", indent=width + 2))
    if len(shown) < len(listed):
        print(f"{len(listed) - len(shown)} more: bertrain recipes --all")


@app.command("settings")
def settings(
    words: Annotated[list[str] | None, Argument(metavar="[WORD...]", help="a section, or words to search for")] = None,
    show_all: Annotated[bool, Option("--all", help="also list experimental settings")] = False,
    as_json: AsJson = False,
) -> None:
    """List all settings with their defaults and meanings, or search them.

    Example: bertrain settings learning rate
    """
    described = config.find_settings(" ".join(words)) if words else config.describe()
    if printed_json(described, as_json):
        return
    shown = [entry for entry in described if show_all or not entry["experimental"]]
    for entry in shown:
        marks = f"{'' if entry['shapes_training'] else ' *'}{' (experimental)' if entry['experimental'] else ''}"
        print(wrap(f"--{entry['name']} ({entry['default']!r}){marks}\n    {entry['help']}"))
    if not all(entry["shapes_training"] for entry in shown):
        print("\n* a resumed run may change it")
    if len(shown) < len(described):
        print(f"{len(described) - len(shown)} more settings are experimental: --all")


@app.command("doctor")
def doctor(
    folder: Annotated[Path, Argument(help="where runs will be written")] = Path("."),
    kernels: Annotated[
        bool, Option("--kernels", help="only compare every kernel with plain PyTorch, at the sizes of BERT-Base")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Describe this machine: what it has, how bertrain uses it, and what is missing.

    Example: bertrain doctor
    """
    if kernels:
        _examine_kernels(as_json)
        return
    from bertrain.base.doctor import doctor as examine

    findings = examine(folder)
    if printed_json(findings, as_json):
        return
    for finding in findings:
        print(wrap(f"{finding.verdict:<8}{finding.subject:<11}{finding.found}", indent=19))
        print(wrap(f"{'':<19}{finding.consequence}", indent=0))


def _examine_kernels(as_json: bool) -> None:
    """Every run does the same for its own sizes, and keeps the results; here nothing is kept."""
    from bertrain.kernels import self_test
    from bertrain.ranks.parallel import choose_device
    from bertrain.training import engine

    device, _ = choose_device("auto")
    for precision in ("fp8", "bf16"):  # the kernels of FP8 include those of bf16
        settings = config.resolve("bert-base-phase1", [("train.precision", precision)])
        usable, reason = engine.kernels_serve(settings, device)
        if usable:
            break
    results = self_test.examine(engine.kernel_sizes(settings), str(device))[0] if usable else []
    if not printed_json({"usable": usable, "reason": reason, "kernels": results}, as_json):
        print(f"{device}: {reason}" if usable else f"{device}: no kernels; {reason}")
        if usable:
            print(f"{'kernel':<18}{'works':<8}{'error':<10}seconds")
        for result in results:
            error = "-" if result.error is None else f"{result.error:.1e}"
            row = f"{result.kernel:<18}{'no' if result.failure else 'yes':<8}{error:<10}{result.seconds:<9.1f}"
            print(f"{row}{result.failure}".rstrip())
    if any(result.failure for result in results):
        raise Exit(1)
