"""The runs of a sweep: their names, what is refused before any starts, how many train at once, and which is best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertrain.cli.pipeline import count_seeds, parse_grid
from bertrain.pipeline.folder import read_begun, write_begun
from bertrain.pipeline.sweep import Request, check_runs, choose_slots, count_at_once, make_request, plan_runs
from bertrain.planning import memory_fit
from tests import helpers


def request(data: Path, *, what: str = "bert-tiny", **wishes: Any) -> Request:
    given: dict[str, Any] = {"grid": {}, "seeds": [], "init": "", "overrides": None, "settings_file": None}
    return make_request(what, data, **(given | wishes))


def tiny(**given: object) -> dict[str, str]:
    words = helpers.tiny_arguments(**given)
    return {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)}


def test_another_request_is_named_by_its_option(tmp_path: Path) -> None:
    path, begun = (
        tmp_path / "sweep.json",
        request(tmp_path, overrides=tiny(train__seed=3), grid={"batch.shares": ["ü"]}),
    )
    write_begun(path, begun, done=["one"])
    quieter = replace(begun, overrides=begun.overrides | {"log.level": "quiet"})
    assert read_begun(path, quieter, {"done": list[str]}, {})["done"] == ["one"]
    others = (
        (replace(begun, overrides=begun.overrides | {"train.seed": "7"}), "--train.seed 3, not with --train.seed 7"),
        (
            replace(begun, overrides=begun.overrides | {"train.max_steps": "7"}),
            "--train.max_steps 20, not with --train.max_steps 7",
        ),
        (replace(begun, what="bert-mini"), "WHAT bert-tiny, not with WHAT bert-mini"),
        (replace(begun, seeds=[1, 2]), "no --seeds, not with --seeds 1 2"),
        (replace(begun, grid={}), '--grid {"batch.shares": ["ü"]}, not with no --grid'),
    )
    for other, difference in others:
        with helpers.refused("other-request", tmp_path, difference, "another --out"):
            read_begun(path, other, {"done": list[str]}, {"what": "WHAT"})


def test_grids_are_read_as_typed() -> None:
    assert parse_grid(["a.b=1e-4, 2e-4", 'task.class_weights=balanced,"x=2,y=1"']) == {
        "a.b": ["1e-4", "2e-4"],
        "task.class_weights": ["balanced", "x=2,y=1"],
    }
    assert count_seeds("3") == [1, 2, 3]
    assert count_seeds("5,7") == [5, 7]
    assert count_seeds("") == []
    for word in ("optimizer.name", "optimizer.name=", "optimizer.name=lamb,,adamw"):
        with helpers.refused("bad-grid", repr(word)):
            parse_grid([word])
    with helpers.refused("conflicting-options", "--grid a.b"):
        parse_grid(["a.b=1", "a.b=2"])
    with helpers.refused("invalid-seeds", "two"):
        count_seeds("two")


def test_the_recipe_of_a_sweep_may_list_its_trackers(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "bert-tiny"\n[log]\ntrackers = ["mlflow", "tensorboard"]\n')
    asked = request(tmp_path, what=str(recipe), seeds=[1])
    (changes,) = plan_runs(asked).values()
    assert asked.resolve(changes).log.tracker_names() == ["mlflow", "tensorboard"]


def test_every_combination_has_a_name_and_seeds_come_last(tmp_path: Path) -> None:
    grid = {"optimizer.learning_rate": ["1e-4", "2e-4"], "optimizer.name": ["lamb"]}
    planned = plan_runs(request(tmp_path, grid=grid, seeds=[1, 2]))
    assert list(planned) == [
        "learning_rate=1e-4,name=lamb,seed=1",
        "learning_rate=2e-4,name=lamb,seed=1",
        "learning_rate=1e-4,name=lamb,seed=2",
        "learning_rate=2e-4,name=lamb,seed=2",
    ]
    assert list(planned.values())[3] == {
        "optimizer.learning_rate": "2e-4", "optimizer.name": "lamb", "train.seed": "2"
    }  # fmt: skip
    names = ["model.config", "task.name", "optimizer.name"]
    planned = plan_runs(request(tmp_path, grid={key: ["../a b", "é/../x", "./a;b"] for key in names}))
    assert next(iter(planned)) == "config=.._a_b,task.name=.._a_b,optimizer.name=.._a_b"
    assert len(planned) == 27
    assert not any("/" in name or " " in name for name in planned)
    assert list(plan_runs(request(tmp_path, grid={"data.slice": ["x" * 300]}))) == ["run=1"]


def test_what_contradicts_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with helpers.refused("missing-option", "--grid"):
        request(tmp_path)
    with helpers.refused("unknown-recipe", "bert-tinyy", "'bert-tiny'"):
        request(tmp_path, what="bert-tinyy", seeds=[1])
    for wishes in (
        {"grid": {"train.seed": [1]}, "seeds": [1]},
        {"overrides": {"train.seed": 1}, "seeds": [1]},
        {"overrides": {"optimizer.name": "lamb"}, "grid": {"optimizer.name": ["adamw"]}},
    ):
        with helpers.refused("conflicting-options", "also varied"):
            request(tmp_path, **wishes)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with helpers.refused("not-launchable"):
        request(tmp_path, seeds=[1])


def test_every_run_is_checked_before_the_first_starts(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)

    def check(**grid: list[str]) -> None:
        varied = {key.replace("__", "."): values for key, values in grid.items()}
        fixed = {key: value for key, value in tiny().items() if key not in varied}
        asked = request(data, grid=varied, overrides=fixed)
        check_runs(asked, plan_runs(asked), tmp_path / "out")

    check(optimizer__beta1=["0.8", "0.9"])
    with helpers.refused("unknown-setting", "optimizer.betal"):
        check(optimizer__betal=["0.8"])
    with helpers.refused("invalid-value", "optimizer.beta1"):
        check(optimizer__beta1=["0.8", "high"])
    with helpers.refused("example-too-long", "data.max_seq_length"):
        check(data__max_seq_length=["64", "16"])
    with helpers.refused("repeated-value", "beta1=0.90"):
        check(optimizer__beta1=["0.9", "0.90"])
    assert not (tmp_path / "out").exists()


def test_memory_cores_and_wishes_limit_how_many_train_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_at_once(9, 5, 4, 0) == (4, "4 cores")
    assert count_at_once(9, 5, 4, 8) == (5, "no more fit into memory")
    assert count_at_once(9, 5, 4, 3) == (3, "--at-once 3")
    assert count_at_once(2, 5, 4, 0) == (2, "all that are left")
    data = helpers.make_data(tmp_path)
    asked = request(data, seeds=[1, 2, 3, 4, 5], overrides=tiny(train__device="cpu"))
    planned = plan_runs(asked)
    needed = check_runs(asked, planned, tmp_path / "out").needed
    monkeypatch.setattr(memory_fit, "free_memory", lambda: 3 * needed + 1)
    slots = choose_slots(asked, planned, tmp_path / "out", 4)
    assert len(slots.cpus) == 3
    assert slots.reason.startswith("3 at once (no more fit into memory); a run needs about 0.5")
    monkeypatch.setattr(memory_fit, "free_memory", lambda: needed - 1)
    with helpers.refused("out-of-memory"):
        choose_slots(asked, planned, tmp_path / "out", 1)


def test_paths_among_the_settings_hold_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = request(tmp_path, seeds=[1], overrides={"evaluate.data": "held-out", "train.max_steps": "3"})
    assert asked.overrides == {"evaluate.data": str(tmp_path / "held-out"), "train.max_steps": "3"}
