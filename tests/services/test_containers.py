"""The container files, as far as they can be tried without an engine: every step is run, in the files' own order.

The base image is not pulled, and pip installs the package alone, beside the packages that are here already.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_both_files_say_the_same() -> None:
    (base,) = (rest for keyword, rest in instructions() if keyword == "FROM")
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base), "an exact version of a small image"
    assert f"From: {base}\n" in DEFINITION
    assert section("post") == ["cd /opt/bertrain", *steps()]
    assert [line.split() for line in section("files")] == [[name, f"/opt/bertrain/{name}"] for name in copied()]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line[1:] for line in ignored if line.startswith("!")] == copied(), "what is copied reaches the engine"
    keywords = [keyword for keyword, _ in instructions()]
    assert set(keywords) == {"FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}
    assert keywords.index("FROM") == 0


@pytest.mark.services
@pytest.mark.skipif(os.geteuid() != 0, reason="a step of a container installs Debian's packages, which takes root")
def test_every_step_runs(tmp_path: Path) -> None:
    for name in copied():
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    site = tmp_path / "site"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DEBIAN_FRONTEND": "noninteractive",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the option's own value: no isolation
        "PIP_TARGET": str(site),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    for step in steps():
        done = subprocess.run(["sh", "-ec", step], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
    assert (site / "bertrain" / "config" / "recipes" / "bert-tiny.toml").is_file()
    where = [sys.executable, "-c", "import bertrain; print(bertrain.__file__)"]
    alone = environment | {"PYTHONPATH": str(site)}
    found = subprocess.run(where, cwd=site, env=alone, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(site))


@pytest.mark.services
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here; Debian's package is called so")
def test_a_linter_has_nothing_to_say_of_the_steps() -> None:
    text = "\n".join(["#!/bin/sh", "set -e", *steps(), *section("runscript")])
    done = subprocess.run(["shellcheck", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
