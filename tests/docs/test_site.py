"""The documentation site and the project's files: every page is in the navigation, and workflows call real targets."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import bertrain
from bertrain.base.extras import EXTRAS
from tests.docs.test_documents import name_of, without_code

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose Python objects are of no interest here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_of(navigation: Any) -> list[str]:
    """The pages of a part of mkdocs.yml's `nav`, in order."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_of(part)]


# --- the site ----------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once() -> None:
    listed = pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    outside = {f"repository/{path.name}" for path in OUTSIDE}
    assert sorted(listed) == sorted(written | outside)
    assert listed[:3] == ["README.md", "install.md", "tutorial.md"], "a newcomer finds the tutorial first"


@pytest.mark.parametrize("document", [*OUTSIDE, *sorted(DOCS.rglob("*.md"))], ids=name_of)
def test_lists_start_after_a_blank_line(document: Path) -> None:
    """GitHub does not mind, but the site would show such a list as one paragraph."""
    lines = without_code(document.read_text(encoding="utf-8")).splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        is_item = re.match(r"(- |\d\d?\. )", line)
        starts = is_item and before.strip() and not re.match(r"(- |\d+\. |\s)", before)
        assert not starts, f"{name_of(document)}: no blank line before {line!r}"


def test_the_documents_are_of_a_size_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Below 27,000 words without reference and notebooks, which nobody reads through; `pytest -s` prints the count."""
    pages = [path for path in DOCS.glob("*.md") if path.name not in ("reference.md", "errors.md")]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    with capsys.disabled():
        print(f"\ndocs: {words:,} words on {len(pages)} pages, without reference, errors and notebooks")
    assert words < 27_000, "shorten pages before you add to them"


def test_links_out_of_docs_lead_somewhere_on_the_site(tmp_path: Path) -> None:
    """The hook rewrites them; mkdocs itself is tried by `make docs`, and its `File` is not needed here."""
    source = (
        (DOCS / "site_hooks.py").read_text().replace("from mkdocs.structure.files import File, InclusionLevel\n", "")
    )
    (tmp_path / "site_hooks.py").write_text(source)
    specification = importlib.util.spec_from_file_location("site_hooks", tmp_path / "site_hooks.py")
    assert specification is not None
    assert specification.loader is not None
    hooks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hooks)
    hooks.DOCS, hooks.ROOT = DOCS, ROOT

    class Page:
        def __init__(self, path: str, address: str) -> None:
            self.file = self
            self.abs_src_path, self.src_uri = str(ROOT / path), address

    def shown(text: str, page: Page) -> str:
        return hooks.on_page_markdown(text, page=page, config=None, files=None)

    page = Page("docs/notebook/speed.md", "notebook/speed.md")
    assert (
        shown("[a](../performance.md#cpu) [b](https://x.y/z)", page) == "[a](../performance.md#cpu) [b](https://x.y/z)"
    )
    assert shown("[a](../../SECURITY.md)", page) == "[a](../repository/SECURITY.md)"
    page = Page("CONTRIBUTING.md", "repository/CONTRIBUTING.md")
    assert shown("[a](docs/glossary.md) [b](#style)", page) == "[a](../glossary.md) [b](#style)"
    assert ROOT / "benchmarks" / "gpu_memory.py" in set(hooks.linked(DOCS / "how-to-memory.md"))


# --- the project's files -----------------------------------------------------------------------------


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name_of)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    read = yaml.safe_load(workflow.read_text())
    called = []
    for job in read["jobs"].values():
        assert job["timeout-minutes"] <= 120
        called += [target for step in job["steps"] for target in re.findall(r"make ([a-z-]+)", step.get("run", ""))]
    assert called
    assert set(called) <= TARGETS


def test_the_workflows_and_our_own_ci_call_the_same_targets() -> None:
    """`test` runs `quick`; a test of `make test` installs the wheel elsewhere, so the whole of test-wheel is theirs.

    The long tests are larger versions of others, and run every night alone.
    """
    here = set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    there = {target for path in WORKFLOWS for target in re.findall(r"run: make ([a-z-]+)", path.read_text())}
    assert here <= TARGETS
    assert there == here | {"quick", "lowest", "test-wheel", "test-long"}


def test_pythons_are_the_same_everywhere() -> None:
    """In the classifiers and in the workflow."""
    versions = [entry.rpartition(" ")[2] for entry in PROJECT["classifiers"] if "Python :: 3." in entry]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["quick"]["strategy"]["matrix"]["python"] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_hooks_and_citation() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-format", "ruff-check", "mypy"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == bertrain.__version__
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


# --- extras ------------------------------------------------------------------------------------------

MODULES = {
    "mlflow": "mlflow-skinny",
    "sklearn": "scikit-learn",
}  # by the name of their package, where it differs from the module's
OPTIONAL = {"triton", "pynvml"}
"""Modules that the package does without where they are missing."""


def requirements(entries: list[str]) -> set[str]:
    return {Requirement(entry).name for entry in entries}


def test_every_extra_installs_what_its_errors_name() -> None:
    for module, (extra, _) in EXTRAS.items():
        package = MODULES.get(module, module.replace("_", "-"))
        assert package in requirements(PROJECT["optional-dependencies"][extra])


def test_the_base_is_imported_first_and_extras_when_used() -> None:
    """Every import of another's module is of a base package or, within a function, of an extra that has an error."""
    base = {name.replace("-", "_") for name in requirements(PROJECT["dependencies"])} | {"markupsafe"}
    for path in (ROOT / "bertrain").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"bertrain", "__future__"}
            optional = foreign - base
            assert optional <= EXTRAS.keys() | OPTIONAL, f"{path}:{node.lineno}"
            assert not optional - OPTIONAL or node.col_offset > 0, f"{path}:{node.lineno} imports {optional} at once"
