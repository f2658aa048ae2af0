"""What `bertrain train` chooses, for texts and machines of any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.base.formatting import COLUMNS
from bertrain.base.units import parse_duration
from bertrain.cli.options import split_settings
from bertrain.config.model_size import count_parameters
from bertrain.config.resolve import resolve
from bertrain.pipeline.plan import LEAST_STEP, SIZES, Machine, Text, plan_training
from bertrain.pipeline.request import make_request
from tests.helpers import refused

OUT = Path("out")
TWO_CORES = Machine("two cores", 1, 8e9, is_gpu=False)
H200 = Machine("H200", 1, 4e14, is_gpu=True)


def text_of(megabytes: float, documents: int = 1000) -> Text:
    return Text(documents, 20 * documents, int(megabytes * 1e6))


def size_of(text: Text, machine: Machine, budget: str) -> str:
    return plan_training(text, machine, budget=budget).recipe.removeprefix("bert-")


def test_the_size_follows_budget_machine_and_text() -> None:
    assert size_of(text_of(40), TWO_CORES, "5m") == "tiny"
    assert size_of(text_of(400), H200, "30m") == "base"
    assert size_of(text_of(2), H200, "30m") in ("tiny", "mini"), "two megabytes do not feed a large model"
    assert size_of(text_of(4000), H200, "72h") == "large"


@given(megabytes=st.floats(0.2, 1e5), seconds=st.integers(60, 10**6), flops=st.floats(1e9, 1e16))
def test_any_plan_is_a_run_that_can_be_resolved(megabytes: float, seconds: int, flops: float) -> None:
    machine = Machine("any", 1, flops, is_gpu=True)
    plan = plan_training(text_of(megabytes), machine, budget=f"{seconds}s")
    settings = plan.settings(OUT)
    assert settings.batch.tokens >= LEAST_STEP
    stages = [plan, plan.generator] if plan.generator else [plan]
    shares = [parse_duration(one.settings(OUT).train.budget, "--budget") for one in stages]
    assert sum(shares) == pytest.approx(seconds, abs=1)
    longer = plan_training(text_of(megabytes), machine, budget=f"{3 * seconds}s").settings(OUT)
    if longer.data.max_seq_length == settings.data.max_seq_length:
        assert count_parameters(longer.model)[1] >= count_parameters(settings.model)[1]


def test_what_the_user_sets_stands_above_every_choice() -> None:
    given_settings = {"optimizer.learning_rate": "7e-4", "data.max_seq_length": "64"}
    plan = plan_training(text_of(40), TWO_CORES, budget="5m", size="mini", given=given_settings)
    assert plan.recipe == "bert-mini"
    assert plan.settings(OUT).optimizer.learning_rate == 7e-4
    assert plan.settings(OUT).data.max_seq_length == 64
    assert [line.split()[:2] for line in plan.lines() if "rate" in line] == [["optimizer.learning_rate", "7e-4"]]


@pytest.mark.parametrize("name", ["train.max_steps", "train.epochs"])
def test_steps_or_epochs_take_the_place_of_the_budget(name: str) -> None:
    train = plan_training(text_of(40), TWO_CORES, budget="5m", given={name: "7"}).settings(OUT).train
    assert not train.budget
    assert getattr(train, name.partition(".")[2]) == 7


def test_a_model_that_reads_too_little_is_named() -> None:
    def warnings(budget: str) -> list[str]:
        plan = plan_training(text_of(40), TWO_CORES, budget=budget)
        return [one.reason for one in plan.choices if one.what == "warning"]

    assert "--budget" in warnings("10s")[0]
    assert not warnings("2h")


def test_every_size_has_a_recipe() -> None:
    for size in SIZES:
        assert plan_training(text_of(40), H200, budget="1h", size=size).settings(OUT).model.num_layers > 1


def test_single_sentences_have_no_next_one() -> None:
    tweets = Text(documents=50_000, sentences=60_000, characters=5_000_000)
    assert not plan_training(tweets, TWO_CORES, budget="5m").settings(OUT).model.nsp
    assert plan_training(text_of(5), TWO_CORES, budget="5m").settings(OUT).model.nsp


@pytest.mark.parametrize(
    ("text", "code"),
    [(Text(1, 3, 1000), "too-little-text"), (Text(1, 9000, 5_000_000), "too-few-documents")],
)
def test_too_little_is_refused(text: Text, code: str) -> None:
    with refused(code):
        plan_training(text, TWO_CORES, budget="5m")


def test_an_unknown_size_is_refused() -> None:
    with refused("invalid-value", "enormous", "tiny"):
        plan_training(text_of(5), TWO_CORES, budget="5m", size="enormous")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "other"), [("batch.tokens", "sequences"), ("batch.sequences", "tokens")])
def test_the_user_may_measure_a_step_either_way(name: str, other: str) -> None:
    plan = plan_training(text_of(40), TWO_CORES, budget="5m", given={name: "1024"})
    settings = plan.settings(OUT)
    assert (getattr(settings.batch, name.removeprefix("batch.")), getattr(settings.batch, other)) == (1024, 0)
    assert [one.what for one in plan.choices if one.what in ("step", name, f"batch.{other}")] == [name]


def test_settings_may_stand_anywhere_among_the_texts() -> None:
    words = ["a.txt", "--batch.tokens", "512", "b.txt", "--train.seed=3", "c.txt"]
    assert split_settings(words) == (["a.txt", "b.txt", "c.txt"], ["--batch.tokens", "512", "--train.seed=3"])


@pytest.mark.parametrize(("machine", "budget"), [(TWO_CORES, "2m"), (H200, "2m"), (H200, "24h")])
def test_every_choice_has_one_line(machine: Machine, budget: str) -> None:
    plan = plan_training(text_of(40), machine, budget=budget)
    lines = plan.lines()
    assert len(lines) == len(plan.choices), "\n".join(lines)
    assert max(map(len, lines)) <= COLUMNS


def test_a_budget_of_many_epochs_is_remarked_on() -> None:
    warnings = [one.value for one in plan_training(text_of(40), H200, budget="24h").choices if one.what == "warning"]
    assert warnings == ["over 200 epochs"]
    assert not any(one.what == "warning" for one in plan_training(text_of(4000), H200, budget="2m").choices)


def test_more_words_are_masked_unless_the_user_says_how_many() -> None:
    plan = plan_training(text_of(40), H200, budget="9m")
    assert plan.settings(OUT).data.mask_probability == 0.3
    assert "masked words" in [one.what for one in plan.choices]
    set_by_user = plan_training(text_of(40), H200, budget="9m", given={"data.mask_probability": "0.2"})
    assert set_by_user.settings(OUT).data.mask_probability == 0.2
    assert "masked words" not in [one.what for one in set_by_user.choices]


def test_steps_and_first_heads_follow_the_device_and_are_said() -> None:
    on_gpu = plan_training(text_of(4000), H200, budget="9m")
    chosen = on_gpu.settings(OUT)
    model = replace(chosen.model, vocab_size=on_gpu.vocabulary_size)
    tokens = H200.tokens_in(540, replace(chosen, model=model))
    assert int(on_gpu.overrides["batch.tokens"]) == pytest.approx(tokens / 16_000, rel=0.01)
    assert on_gpu.overrides["model.initial_heads"] == "neighbours"
    assert on_gpu.overrides["model.initial_bias"] == "frequencies"
    assert {"first heads", "output bias"} <= {one.what for one in on_gpu.choices}
    set_by_user = plan_training(text_of(4000), H200, budget="9m", given={"model.initial_heads": "random"})
    assert set_by_user.overrides["model.initial_heads"] == "random"
    assert "first heads" not in [one.what for one in set_by_user.choices]
    continued = plan_training(text_of(40), H200, budget="9m", init="weights")
    new_only = {"model.initial_heads", "model.initial_bias", "data.mask_probability"}
    assert continued.overrides.keys().isdisjoint(new_only)


def test_tokens_are_counted_for_the_model_of_the_initial_weights() -> None:
    def evaluates_every(name: str) -> int:
        model = resolve(f"bert-{name}").model
        plan = plan_training(text_of(400), H200, budget="30m", init="weights", initial=replace(model, head="classify"))
        return int(plan.overrides["evaluate.every_samples"])

    assert evaluates_every("tiny") > 20 * evaluates_every("base")
    unknown = plan_training(text_of(400), H200, budget="30m", init="hub:somebody/bert")
    assert int(unknown.overrides["evaluate.every_samples"]) == evaluates_every("base")


def test_settings_of_the_machine_are_of_the_fine_tuning_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text("text,label\na,b\n")
    given = {
        "train.device": "cpu", "log.level": "quiet", "train.seed": "7", "optimizer.learning_rate": "1e-3",
        "task.text": "text", "model.config": "shape.json",
    }  # fmt: skip
    asked: dict[str, object] = {
        "inputs": "articles", "out": "out", "budget": "1m", "evaluation_share": 0.1, "cased": False, "language": "auto",
        "init": "", "size": "auto", "task": "classify=labels.csv", "text_column": "auto", "encoding": "auto",
        "document_end": "auto", "on_error": "stop", "overrides": given,
    }  # fmt: skip
    request = make_request(asked)
    assert set(request.settings(of_task=True)) == {"train.device", "log.level", "train.seed", "task.text"}
    assert set(request.settings(of_task=False)) == set(given) - {"task.text"}
    assert request.settings(of_task=False)["model.config"] == str(tmp_path / "shape.json"), "in whatever folder"


def test_a_base_model_learns_from_replaced_words_unless_the_user_says_otherwise() -> None:
    plan = plan_training(text_of(400), H200, budget="1h", given={"train.seed": "7", "optimizer.learning_rate": "1e-4"})
    main, first = plan.settings(OUT), plan.generator
    assert first
    assert (first.recipe, first.generator) == ("bert-mini", None)
    assert (main.model.rtd, main.data.generator, main.train.budget) == (50, str(OUT.absolute() / "generator"), "3060s")
    generator = first.settings(OUT)
    assert (generator.train.budget, generator.train.seed, generator.optimizer.learning_rate) == ("540s", 7, 2e-3)
    assert generator.data.mask_probability == main.data.mask_probability
    assert any(line.split()[:2] == ["generator", "mini,"] for line in plan.lines())
    for key, value in (("model.rtd", "0"), ("train.max_steps", "1000")):
        changed = plan_training(text_of(400), H200, budget="1h", given={key: value})
        assert (changed.generator, changed.settings(OUT).model.rtd) == (None, 0), key
    assert plan_training(text_of(400), H200, budget="1h", init="weights").generator is None
    assert plan_training(text_of(400), H200, budget="1h", size="medium").generator is None
