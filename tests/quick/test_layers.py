"""A subpackage imports only those that stand before it in this list; imports inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import bertrain

ROOMS = [
    "base",
    "config",
    "kernels",
    "model",
    "optim",
    "data.text",
    "data.formats",
    "data.prepare",
    "data.feed",
    "run",
    "weights",
    "tasks",
    "ranks",
    "planning",
    "training",
    "reports",
    "profiling",
    "launch",
    "pipeline",
    "serving",
    "mlperf",
    "cli",
]
PACKAGE = Path(bertrain.__file__).parent
MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
AT_THE_TOP = {"__init__", "__main__"}  # the public functions, and the command line


def room_of(module: str) -> str:
    (room,) = (room for room in ROOMS if module == room or module.startswith(f"{room}."))
    return room


def imports_of(path: Path) -> Iterator[str]:
    """The modules of bertrain that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name.removeprefix("bertrain.") for name in names if name.startswith("bertrain."))


@pytest.mark.parametrize("module", sorted(MODULES.keys() - AT_THE_TOP - {"data.__init__"}))
def test_a_subpackage_imports_only_subpackages_before_it(module: str) -> None:
    allowed = ROOMS[: ROOMS.index(room_of(module)) + 1]
    for imported in imports_of(MODULES[module]):
        if imported != "__version__":
            assert room_of(imported) in allowed, f"bertrain.{module} imports bertrain.{imported}"


def test_no_room_hides_a_public_function() -> None:
    import importlib

    for module in MODULES.keys() - {"__main__", "cli.__main__"}:
        importlib.import_module(f"bertrain.{module}".removesuffix(".__init__"))
    for name in bertrain.__all__:
        assert callable(getattr(bertrain, name)) or name == "__version__", name
