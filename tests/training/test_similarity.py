"""The task `similarity`: gradients of a whole step, ranks and budgets, resume, metrics, export, bad input."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.ranks.parallel import Ranks
from bertrain.run.records import EvaluationRecord, last_record
from bertrain.tasks.similarity import SimilarityTask, rank_metrics
from bertrain.training.contrastive_engine import ranking_loss, scored_loss
from bertrain.training.embed import embed
from bertrain.training.finetune import finetune
from bertrain.training.predict import evaluate_task, predict
from bertrain.training.resolved_run import resolve_run
from bertrain.training.state import TrainState
from bertrain.training.task_results import metrics_of
from bertrain.training.task_settings import resolve_task
from bertrain.weights.export import export
from tests import helpers
from tests.launched import kill_when, records
from tests.miniature_tasks import command_line
from tests.training.test_embed import encoder as encoder

KINDS = ("scored", "pairs", "triplets")
USUAL = {
    "task.max_score": "5", "data.max_seq_length": "32", "batch.sequences": "8", "batch.token_budget": "64",
    "train.epochs": "2", "train.threads": "1", "train.precision": "fp32", "log.level": "quiet",
    "log.trackers": "none", "optimizer.learning_rate": "1e-3",
}  # fmt: skip


def write_data(folder: Path, kind: str, *, rows: int = 24) -> Path:
    """Pairs that share words, and negatives that do not."""
    folder.mkdir()
    words, draw = helpers.vocabulary_words(), np.random.default_rng(1)
    for split, count in (("train", rows), ("dev", 12)):
        lines = []
        for _ in range(count):
            one = list(draw.choice(words, draw.integers(2, 12)))
            shared = int(draw.integers(0, len(one) + 1))
            two = one[:shared] + list(draw.choice(words, draw.integers(1, 9)))
            row: dict[str, Any] = {"sentence1": " ".join(one), "sentence2": " ".join(two)}
            if kind == "scored":
                row["score"] = 5 * shared / len(one)
            if kind == "triplets":
                row["negative"] = " ".join(draw.choice(words, 5))
            lines.append(json.dumps(row) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def task_settings(**overrides: object) -> Settings:
    return resolve_task("similarity", USUAL | {key.replace("__", "."): str(value) for key, value in overrides.items()})


def gradients(encoder: Path, data: Path, **overrides: object) -> tuple[dict[str, torch.Tensor], float, Settings, Any]:
    """Gradients and loss of the first step on the engine, and what they were computed from."""
    resolved = resolve_run(
        task_settings(**overrides), data, None, init=str(encoder), ranks=Ranks(0, 1, torch.device("cpu"))
    )
    state = TrainState.build(resolved.settings, Ranks(0, 1, torch.device("cpu")))
    for name, parameter in helpers.build_model(resolved.settings.model).named_parameters():
        state.arena.named(state.arena.values)[name].copy_(parameter.detach())
    step = Loader(resolved.data, resolved.settings).step(0, 0)
    state.engine.restore({})
    state.engine.begin(step)
    for number, batch in enumerate(step.bins, 1):
        state.engine.add_bin(batch, step, is_last=number == len(step.bins))
    named = {name: tensor.clone() for name, tensor in state.arena.named(state.arena.gradients).items()}
    return named, float(state.engine.sums[1]) / step.num_sequences, resolved.settings, (state, step, resolved.data)


NO_DROPOUT = {"model__hidden_dropout": 0, "model__attention_dropout": 0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_gradient_is_that_of_one_pass(encoder: Path, tmp_path: Path, kind: str, pooling: str) -> None:
    """All bins in one graph under autograd, and the losses of sentence-transformers on the same vectors."""
    data = write_data(tmp_path / "data", kind)
    found, loss, _, (state, step, _) = gradients(
        encoder, data, model__pooling=pooling, task__temperature=0.07, **NO_DROPOUT
    )
    assert len(step.bins) > 2
    vectors: list[torch.Tensor | None] = [None] * step.num_texts
    scores = torch.zeros(step.num_texts)
    state.arena.gradients.zero_()
    for batch, places in zip(step.bins, step.places, strict=True):
        pooled = state.model(batch).answers[batch.is_real]
        for row, place in enumerate(places):
            vectors[place] = pooled[row]
            scores[place] = batch.answers[batch.is_real][row, 0]
    table = torch.stack([vector for vector in vectors if vector is not None])
    examples = table.unflatten(0, (step.num_sequences, -1))
    expected = _their_loss(kind, examples, scores.view(step.num_sequences, -1)[:, 0], 0.07)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    gradient = torch.cat([tensor.flatten() for tensor in state.arena.named(state.arena.gradients).values()])
    assert float(gradient.norm()) > 1e-2
    assert helpers.relative_error(torch.cat([tensor.flatten() for tensor in found.values()]), gradient) <= 1e-5


def _their_loss(kind: str, examples: torch.Tensor, scores: torch.Tensor, temperature: float) -> torch.Tensor:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    columns = [{"sentence_embedding": examples[:, number]} for number in range(examples.shape[1])]

    def model(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return features

    if kind == "scored":
        return losses.CosineSimilarityLoss(model)(columns, scores)
    return losses.MultipleNegativesRankingLoss(model, scale=1 / temperature)(columns, None)


def test_the_losses_are_sums(tmp_path: Path) -> None:
    vectors, scores = torch.randn(5, 2, 8), torch.rand(5)
    one_by_one = sum(scored_loss(vectors[row : row + 1], scores[row : row + 1]) for row in range(5))
    torch.testing.assert_close(scored_loss(vectors, scores), one_by_one)
    assert float(ranking_loss(vectors[:1], 0.05)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_token_budgets_give_the_same_gradient(encoder: Path, tmp_path: Path, kind: str) -> None:
    data = write_data(tmp_path / "data", kind)
    small, loss, *_ = gradients(encoder, data, batch__token_budget=64, **NO_DROPOUT)
    large, other, *_ = gradients(encoder, data, batch__token_budget=4096, **NO_DROPOUT)
    assert loss == pytest.approx(other, rel=1e-5)
    total = torch.cat([tensor.flatten() for tensor in small.values()])
    assert helpers.relative_error(total, torch.cat([tensor.flatten() for tensor in large.values()])) <= 1e-5


def test_both_passes_draw_the_same_dropout(encoder: Path, tmp_path: Path) -> None:
    """Where they did not, the gradient would not be that of the loss: compare with finite differences."""
    data = write_data(tmp_path / "data", "pairs")
    found, _, _, (state, step, _) = gradients(encoder, data, model__hidden_dropout=0.3, model__attention_dropout=0.3)
    name = "layers.1.output_norm.weight"
    parameter = state.arena.named(state.arena.values)[name]
    slope, step_size = found[name].clone(), 1e-2 / float(found[name].norm())
    losses = []
    for sign in (1, -1):
        parameter += sign * step_size * slope
        state.engine.begin(step)
        losses.append(float(state.engine.sums[1]) / step.num_sequences)
        parameter -= sign * step_size * slope
    assert (losses[0] - losses[1]) / (2 * step_size) == pytest.approx(float(slope.square().sum()), rel=2e-2)


def test_killed_and_resumed_bitwise(encoder: Path, tmp_path: Path) -> None:
    """By SIGKILL, in the middle of an epoch: negatives are those of the same step again."""
    data, run, calm = write_data(tmp_path / "data", "triplets", rows=160), tmp_path / "run", tmp_path / "calm"
    words = ["finetune", "similarity", "--init", encoder, "--data", data, "--deterministic"]
    words += [word for key, value in USUAL.items() for word in (f"--{key}", value)]
    words += ["--checkpoint.every_steps", 3, "--log.every_steps", 1]
    kill_when(lambda: len(records(run)) >= 8, *words, "--run", run)
    assert 8 <= len(records(run)) < 40
    command_line("resume", run)
    command_line(*words, "--run", calm)
    assert helpers.losses(run) == helpers.losses(calm)
    assert metrics_of(run)["mrr"] == metrics_of(calm)["mrr"]
    one, other = helpers.final_weights(run), helpers.final_weights(calm)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["scored", "pairs"])
def test_it_learns_and_exports(encoder: Path, tmp_path: Path, kind: str) -> None:
    """Held-out metrics are those of the embeddings, and the exported folder embeds like the run."""
    vectors_of = partial(embed, precision="fp32")  # by default, bf16 where the CPU has AMX
    data, run = write_data(tmp_path / "data", kind, rows=400), tmp_path / "run"
    finetune(
        task_settings(train__epochs=4, batch__token_budget=1024, model__pooling="max"), data, run, init=str(encoder)
    )
    losses = helpers.losses(run)
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    rows = [json.loads(line) for line in (data / "dev.jsonl").open()]
    first, second = (vectors_of(run, [row[name] for row in rows]) for name in ("sentence1", "sentence2"))
    record = last_record(run / "metrics.jsonl", EvaluationRecord)
    assert record is not None
    if kind == "scored":
        from scipy.stats import pearsonr, spearmanr

        cosines, scores = (np.asarray(first) * np.asarray(second)).sum(1), [row["score"] for row in rows]
        assert record.metrics["spearmanr"] == pytest.approx(spearmanr(cosines, scores).statistic, abs=1e-6)
        assert record.metrics["pearson"] == pytest.approx(pearsonr(cosines, scores).statistic, abs=1e-4)
    else:
        near = np.asarray(first) @ np.asarray(second).T
        ranks = 1 + (near > np.diag(near)[:, None]).sum(1)
        assert record.metrics["mrr"] == pytest.approx((1 / ranks).mean(), abs=1e-6)
        assert record.metrics["recall_at_1"] == pytest.approx((ranks == 1).mean(), abs=1e-6)
        other = evaluate_task(run, data / "dev.jsonl", overrides=[("task.recall_at", "3, 2")])
        recalls = {name: value for name, value in other.items() if name.startswith("recall")}
        assert recalls == {f"recall_at_{k}": pytest.approx((ranks <= k).mean(), abs=1e-6) for k in (2, 3)}
        for wrong in ("0", "1,x", ""):
            with helpers.refused("invalid-value", "task.recall_at", repr(wrong)):
                task_settings(task__recall_at=wrong)
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(export(run, tmp_path / "exported")), device="cpu")
    scored = evaluate_task(run, data / "dev.jsonl")  # a file alone, without training data
    assert scored["spearmanr" if kind == "scored" else "mrr"] == pytest.approx(next(iter(record.metrics.values())))
    (predicted,) = predict(run, data / "dev.jsonl", tmp_path / "predictions").values()
    written = [json.loads(line)["similarity"] for line in Path(predicted["files"][0]).read_text().splitlines()]
    assert written == pytest.approx((np.asarray(first) * np.asarray(second)).sum(1).tolist(), abs=1e-5)
    texts = [row["sentence1"] for row in rows] + ["bato " * 50]
    np.testing.assert_allclose(model.encode(texts), np.asarray(vectors_of(run, texts)), atol=1e-5)
    np.testing.assert_array_equal(
        np.asarray(vectors_of(tmp_path / "exported", texts)), np.asarray(vectors_of(run, texts))
    )


def test_ranks_among_candidates() -> None:
    anchors = np.eye(3, dtype=np.float32)
    others = np.stack([anchors[[0, 0, 2]], anchors[[1, 1, 1]]], axis=1)  # [example, (positive, negative), width]
    numbers = np.array([[0, 1], [0, 1], [2, 1]])  # the first two positives are one text; so are all negatives
    found = rank_metrics(anchors, others, numbers, (1, 2, 10))
    # The second anchor's positive is as far as the third text, and farther than the negative: rank 3.
    assert found == {
        "mrr": pytest.approx((1 + 1 / 3 + 1) / 3),
        "recall_at_1": pytest.approx(2 / 3),
        "recall_at_2": pytest.approx(2 / 3),
        "recall_at_10": 1.0,
    }
    collapsed = np.ones((4, 1), dtype=np.float32)
    same = rank_metrics(collapsed, collapsed[:, None], np.arange(4)[:, None], (1,))
    assert same["recall_at_1"] == 0, "a model whose vectors are all equal finds nothing"


def test_bad_input_by_file_and_line(encoder: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", "scored")

    def refused(code: str, line: str, *named: object, **overrides: object) -> None:
        rows = (data / "train.jsonl").read_text().splitlines()
        (data / "train.jsonl").write_text("\n".join([rows[0], line, *rows[2:]]) + "\n")
        with helpers.refused(code, *named):
            finetune(task_settings(**overrides), data, tmp_path / "run", init=str(encoder))
        (data / "train.jsonl").write_text("\n".join(rows) + "\n")

    place = f"line 2 of {data / 'train.jsonl'}"
    good = '{"sentence1": "bato", "sentence2": "kese", "score": 1}'
    refused("bad-row", '{"sentence1": "bato", "sentence2": "kese", "score": 7}', place, "7", "--task.max_score")
    refused("bad-row", '{"sentence1": "bato", "sentence2": "kese", "score": "x"}', place)
    refused("bad-row", '{"sentence1": "bato", "sentence2": " ", "score": 1}', place)
    refused("bad-row", "nonsense", place)
    refused("missing-column", good, "nothing", "sentence1", task__text="nothing")
    assert not (tmp_path / "run").exists()
    pairs = write_data(tmp_path / "pairs", "pairs")
    with helpers.refused("missing-scores", "score"):
        finetune(task_settings(task__loss="cosine"), pairs, tmp_path / "run", init=str(encoder))
    with helpers.refused("out-of-range", "batch.sequences", "at least 2"):  # its loss would be 0
        finetune(task_settings(batch__sequences=1), pairs, tmp_path / "run", init=str(encoder))
    (tmp_path / "both.csv").write_text("anchor,positive,negative,label\nbato,kese,livi,1\n")
    with helpers.refused("mixed-columns", "'negative'", "'label'"):
        finetune(task_settings(), tmp_path / "both.csv", tmp_path / "run", init=str(encoder))
    (tmp_path / "one.jsonl").write_text(good + "\n")
    with helpers.refused("no-examples", "one.jsonl", "1 row", "--task.hold_out"):
        finetune(task_settings(task__hold_out=0.1), tmp_path / "one.jsonl", tmp_path / "run", init=str(encoder))


def test_scores_that_are_missing_or_not_used_are_said(encoder: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", "scored")
    rows = [json.loads(line) for line in (data / "dev.jsonl").read_text().splitlines()]
    unscored = [{name: row[name] for name in ("sentence1", "sentence2")} for row in rows]
    (data / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unscored))

    def task(**overrides: object) -> SimilarityTask:
        ranks = Ranks(0, 1, torch.device("cpu"))
        found = resolve_run(task_settings(**overrides), data, None, init=str(encoder), ranks=ranks).task
        assert isinstance(found, SimilarityTask)
        return found

    assert not task(task__hold_out=0).held_out()
    assert any("no held-out scores" in note for note in task(task__hold_out=0).notes)
    assert task(task__hold_out=0.25).held_out()["dev"].num_examples == 6
    assert any("no dev part with scores" in note for note in task().notes)
    assert "task.loss cosine" in task().notes
    assert any("whatever its score" in note for note in task(task__loss="ranking").notes)
