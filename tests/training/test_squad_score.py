"""`bertrain score` and its function print the same."""

from __future__ import annotations

import json
from pathlib import Path

from bertrain.tasks.score import score
from bertrain.tasks.squad.files import read_squad
from tests.helpers import bertrain as command_line
from tests.quick.test_squad_score import SAMPLE, invented_predictions


def test_the_verb_and_its_function_say_the_same(tmp_path: Path) -> None:
    data = SAMPLE / "dev-v2.0.json"
    predictions, odds = invented_predictions(read_squad(data, "v2.0"))
    (tmp_path / "predictions.json").write_text(json.dumps(predictions))
    (tmp_path / "odds.json").write_text(json.dumps(odds))
    given = ["--data", data, "--predictions", tmp_path / "predictions.json", "--null-odds", tmp_path / "odds.json"]
    printed = json.loads(command_line("score", "squad/v2.0", *given, "--json").stdout)
    files = {"data": data, "predictions": tmp_path / "predictions.json"}
    assert printed == score("squad/v2.0", **files, null_odds=tmp_path / "odds.json")
    assert printed["best_f1"] == 62.38095238095238
    without = score("squad/v2.0", **files)
    assert "best_f1" not in without
    withheld = score("squad/v2.0", **files, null_odds=tmp_path / "odds.json", null_threshold=-100)
    assert (withheld["NoAns_exact"], withheld["HasAns_exact"]) == (100.0, 0.0)
