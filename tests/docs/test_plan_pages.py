"""Every `bertrain plan` of the documents is run as it stands, and prints the times that the pages name."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import make_data
from tests.miniature_tasks import command_line

DOCS = Path(__file__).parents[2] / "docs"
FIVE = sorted(path for path in DOCS.glob("from-*.md") if path.name != "from-intel-cpu.md")  # which has no prediction


def commands(page: Path) -> list[str]:
    return re.findall(r"bertrain plan \S+ --[^`\n]+", page.read_text(encoding="utf-8"))


HOW_TO = commands(DOCS / "how-to-plan.md")


def test_there_are_as_many_commands_as_are_run() -> None:
    assert len(HOW_TO) == 5
    assert sum("--within" in command for command in HOW_TO) == 1, "which searches as --spend does"


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.long) if "--spend" in one else one for one in HOW_TO]
)
def test_every_command_of_the_how_to_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    printed = command_line(*shlex.split(command)[1:]).out
    assert "a prediction for" in printed
    assert ("is the fastest" in printed) == ("--tune" in command)
    assert ("EUR" in printed) == ("--price" in command)


@pytest.mark.parametrize("page", FIVE, ids=lambda path: path.stem)
def test_the_predicted_times_of_a_page_are_those_of_its_commands(page: Path) -> None:
    named = commands(page)
    assert named
    text = " ".join(page.read_text(encoding="utf-8").split())
    for command in named:
        heads, row = (
            re.split(r"\s{2,}", line.strip()) for line in command_line(*shlex.split(command)[1:]).out.splitlines()[-2:]
        )
        assert row[heads.index("time")] in text, command


def test_the_tables_of_bertrains_own_predictions_are_the_scripts() -> None:
    script = DOCS.parent / "benchmarks" / "plan.py"
    printed = subprocess.run([sys.executable, script, "--tables"], capture_output=True, text=True, check=True).stdout
    text = (DOCS / "how-to-plan.md").read_text(encoding="utf-8")
    for table in printed.split("\n\n"):
        assert len(table.strip().splitlines()) in (2 + 4, 4), "four sizes"
        assert table.strip() in text


def test_the_scores_are_the_scripts() -> None:
    raw = json.loads((DOCS.parent / "benchmarks" / "results" / "plan.json").read_text(encoding="utf-8"))
    text = (DOCS / "how-to-plan.md").read_text(encoding="utf-8")
    for metric, name in (("sequences_per_s", "sequences/s"), ("minutes", "minutes")):
        score = raw["predicted"]["score"][metric]
        within = f"{score['within_20_percent'] * score['rows']:.0f} of {score['rows']}"
        pairs = f"{score['pairs_in_order']:.1%} of {score['pairs']}"
        assert f"| {name} | {score['median_error']:.1%} | {within} | {pairs} |" in text
