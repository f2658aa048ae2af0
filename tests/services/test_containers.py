"""The container files and environment.yml, as far as reading them goes; test_image.py builds the Dockerfile."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "container" / "Dockerfile").read_text()
DEFINITION = (ROOT / "container" / "bertrain.def").read_text()


def instructions() -> list[tuple[str, str]]:
    """The lines of the Dockerfile, each its keyword and the rest."""
    joined = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    pairs = (line.split(" ", 1) for line in joined.splitlines() if line and not line.startswith("#"))
    return [(keyword, rest) for keyword, rest in pairs]


def section(name: str) -> list[str]:
    """The lines of a section of the definition."""
    (body,) = re.findall(rf"^%{name}\n(.*?)(?=^%|\Z)", DEFINITION, re.MULTILINE | re.DOTALL)
    return [line.strip() for line in body.splitlines() if line.strip()]


def steps() -> list[str]:
    return [rest for keyword, rest in instructions() if keyword == "RUN"]


def copied() -> list[str]:
    """What the Dockerfile takes from the checkout."""
    return [name for keyword, rest in instructions() if keyword == "COPY" for name in rest.split()[:-1]]


def smoke_test() -> int:
    """The place in `steps` from which on they test the image."""
    return next(place for place, step in enumerate(steps()) if step.startswith("pip check"))


def test_both_files_say_the_same() -> None:
    (base,) = (rest for keyword, rest in instructions() if rest.startswith("BASE="))
    assert re.fullmatch(r"BASE=python:\d+\.\d+\.\d+-slim-\w+", base), "an exact version of a small image"
    assert ("FROM", "${BASE}") in instructions()
    assert "From: {{ BASE }}\n" in DEFINITION
    assert section("arguments") == ["BOOTSTRAP=docker", base, "PIP_EXTRA_INDEX_URL="]
    installing = [step for step in steps()[: smoke_test()] if not step.startswith("useradd")]  # Apptainer needs no user
    export = 'export PIP_EXTRA_INDEX_URL="{{ PIP_EXTRA_INDEX_URL }}"'
    assert section("post") == [export, "cd /opt/bertrain", *installing]
    assert section("test") == steps()[smoke_test() :]
    (path,) = (rest for keyword, rest in instructions() if rest.startswith("PATH="))
    assert section("environment") == [f"export {path}"]
    assert [line.split() for line in section("files")] == [[name, f"/opt/bertrain/{name}"] for name in copied()]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line[1:] for line in ignored if line.startswith("!")] == copied(), "what is copied reaches the engine"


def test_images_and_conda_have_every_extra_of_users_within_the_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    developers = {"test", "check", "docs", "release"}
    covered = set(re.findall(r"\w+", " ".join(project["optional-dependencies"]["all"]))) - {"bertrain"}
    extras = sorted(set(project["optional-dependencies"]) - developers - covered)
    package = f".[{','.join(extras)}]"
    (torch,) = (one for one in project["dependencies"] if one.startswith("torch"))
    pip = "/opt/venv/bin/pip install --no-cache-dir -c constraints.txt"
    assert [step for step in steps() if " pip " in step or "/pip " in step] == [
        f'{pip} "{torch}"',
        f'{pip} "{package}"',
    ]
    wanted = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert wanted[-1] == {"pip": ["-c constraints.txt", f"-e {package}"]}
    (python,) = (entry.partition("=")[2] for entry in wanted if str(entry).startswith("python="))
    assert python in SpecifierSet(project["requires-python"])


@pytest.mark.services
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here; Debian's package is called so")
def test_a_linter_has_nothing_to_say_of_the_steps() -> None:
    text = "\n".join(["#!/bin/sh", "set -e", "cd /opt/bertrain", *steps(), *section("runscript")])
    done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
