"""Embed texts: one vector for each, by any encoder. The texts of a file are streamed, and a killed job continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bertrain.base.console import remark
from bertrain.base.errors import UserError
from bertrain.base.formatting import counted
from bertrain.base.machine import is_first_rank
from bertrain.config.choices import Device, EmbeddingPrecision, Pooling
from bertrain.config.settings import BatchSettings, DataSettings, Settings, TaskSettings, TrainSettings
from bertrain.data.feed.loader import Loader, in_background
from bertrain.data.formats.block import Block
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.ranks import parallel
from bertrain.ranks.parallel import Ranks
from bertrain.ranks.watchdog import Heartbeat
from bertrain.run.folder import Run
from bertrain.tasks.data import TaskData
from bertrain.tasks.encode import encode_texts
from bertrain.tasks.texts import Survey, Text, TextFile
from bertrain.training.engine import Predictor, choose
from bertrain.training.evaluate import load_predictor, reporting
from bertrain.training.precision import choose_precision
from bertrain.training.task_evaluator import TOKENS_AT_ONCE
from bertrain.training.vector_files import SHARD_ROWS, SUFFIXES, VectorFile, Vectors
from bertrain.weights.hub import locate
from bertrain.weights.sentence_transformers import SentencePipeline, find_pipeline
from bertrain.weights.source import NEWEST, open_source, run_of, vocabulary_of
from bertrain.weights.tensors import Weights, load_tensors

TOKENS_OF_PART, CHARACTERS_PER_TOKEN = 1 << 18, 4  # about


@dataclass(frozen=True)
class Embedded:
    """What `embed` has done with a file."""

    out: str
    texts: int
    width: int
    pooling: Pooling
    normalize: bool
    max_seq_length: int
    precision: str
    truncated: int  # texts longer than max_seq_length, of those embedded by this start
    texts_per_s: float  # of this start; 0 if nothing was left to do


@dataclass(frozen=True)
class Encoder:
    """Weights and a pipeline, resolved: what vectors depend on."""

    weights: Weights
    vocabulary: Vocabulary
    pipeline: SentencePipeline
    settings: Settings

    @staticmethod
    def open(
        source: str | Path,
        *,
        which: str = NEWEST,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        max_seq_length: int = 0,
        precision: EmbeddingPrecision = "auto",
        device: Device = "auto",
    ) -> Encoder:
        """Read the encoder of `source`. Options not given come from its files; else mean, normalized, full length."""
        opened = open_source(source, which=which)
        vocabulary = vocabulary_of(opened, source)
        usual = _usual_pipeline(locate(source), is_run=opened.kind == "run")
        if opened.settings is not None:
            opened = replace(opened, settings=replace(opened.settings, head="embed", pooling=pooling or usual.pooling))
        weights = load_tensors(opened)
        positions = weights.settings.max_positions
        if max_seq_length and not 3 <= max_seq_length <= positions:
            raise UserError(
                "sequence-too-long", f"--max-length is {max_seq_length}; it must be 3 to {positions} for this model"
            )
        pipeline = SentencePipeline(
            weights.settings.pooling,
            usual.normalize if normalize is None else normalize,
            max_seq_length or min(usual.max_seq_length or positions, positions),
        )
        train = TrainSettings(device=device, precision=precision)
        if precision == "auto":
            train = replace(train, precision=choose_precision(train, parallel.choose_device(device)[0])[0])
        settings = Settings(
            model=weights.settings,
            data=DataSettings(max_seq_length=pipeline.max_seq_length),
            task=TaskSettings(name="embed"),
            train=train,
        )
        return Encoder(weights, vocabulary, pipeline, settings)

    def encode(self, texts: Sequence[str]) -> tuple[Block, int]:
        """The tokens of texts, and the number of texts that were truncated."""
        return encode_texts(self.vocabulary, texts, None, self.pipeline.max_seq_length)

    @contextmanager
    def ready(self) -> Iterator[tuple[Predictor, Ranks]]:
        """The model on the device of this rank, and all ranks."""
        with load_predictor(self.weights, self.settings) as (predict, ranks):
            if ranks.is_first:
                pipeline, normalized = self.pipeline, "normalized" if self.pipeline.normalize else "not normalized"
                remark(f"{pipeline.pooling} pooling, {normalized}, at most {pipeline.max_seq_length} tokens a text")
                remark(choose(self.settings, ranks.device)[1])
            yield predict, ranks

    def embed(self, texts: Sequence[str], predict: Predictor, ranks: Ranks) -> tuple[Vectors, int]:
        """The vectors of texts in their order, and the number of texts truncated; computed by this rank alone."""
        parts = (self.encode(part) for part in self._parts(texts))
        found = [(self._vectors(block, predict, ranks), truncated) for block, truncated in in_background(parts, 2)]
        return np.concatenate([vectors for vectors, _ in found]), sum(truncated for _, truncated in found)

    def _parts(self, texts: Sequence[str]) -> Iterator[Sequence[str]]:
        """Texts in order, of some bins each: one part is tokenized while another is computed."""
        tokens = np.minimum([len(text) // CHARACTERS_PER_TOKEN for text in texts], self.pipeline.max_seq_length)
        cuts = np.flatnonzero(np.diff(tokens.cumsum() // TOKENS_OF_PART)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(texts)]):
            yield texts[start:stop]

    @torch.no_grad()
    def _vectors(self, block: Block, predict: Predictor, ranks: Ranks) -> Vectors:
        """The vectors of a block in its order, computed in bins of similar cost."""
        on_cpu, longest = ranks.device.type == "cpu", self.pipeline.max_seq_length
        budget = max(TOKENS_AT_ONCE[ranks.device.type], longest)
        settings = replace(self.settings, batch=BatchSettings(sequences=1, token_budget=budget))
        loader = Loader(TaskData(block, Path(), self.vocabulary, longest), settings, pin_memory=not on_cpu)
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for rows, batch in loader.evaluation_bins(0, len(block)):
            ranks.heartbeat.move()
            batch = batch.without_padding() if on_cpu else batch
            pooled = predict(batch.to(ranks.device)).answers
            assert pooled is not None
            found.append((torch.from_numpy(rows), batch.is_real, pooled))
        # Only now is a GPU waited for: it computes while the host lays out the next bins.
        vectors = torch.empty(len(block), self.settings.model.hidden_size)
        for places, is_real, pooled in found:
            vectors[places] = pooled.float().cpu()[is_real]
        return (torch.nn.functional.normalize(vectors) if self.pipeline.normalize else vectors).numpy()


def _usual_pipeline(path: Path, *, is_run: bool) -> SentencePipeline:
    """The pipeline that a source names or was trained with; mean pooling, normalized, if it names none."""
    if is_run:
        settings = Run.open(run_of(path)).settings
        return SentencePipeline(settings.model.pooling, max_seq_length=settings.data.max_seq_length)
    return find_pipeline(path) or SentencePipeline()


def embed(
    source: str | Path,
    texts: str | Path | Sequence[str],
    out: str | Path | None = None,
    *,
    column: str = "text",
    id_column: str = "",
    which: str = NEWEST,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    max_seq_length: int = 0,
    precision: EmbeddingPrecision = "auto",
    device: Device = "auto",
) -> Vectors | Embedded:
    """Embed texts by a run, or by weights of any format that `show_weights` reads.

    With `out` (.parquet or .npy), `texts` is a file: .txt with a text per line, or a table with a `column` of texts;
    the same call continues a job that was killed. Without it, `texts` is a text or a list of texts, and their vectors
    are returned, [texts, width]. Pooling (mean, cls, max), normalization and length are those of a
    sentence-transformers folder or of the run, unless they are given.

    Example: bertrain.embed("runs/tiny", ["a text", "another text"]).shape
    """
    encoder = Encoder.open(
        source, which=which, pooling=pooling, normalize=normalize, max_seq_length=max_seq_length, precision=precision,
        device=device,
    )  # fmt: skip
    if out is None:
        given = [texts] if isinstance(texts, str) else texts
        if isinstance(given, Path) or not len(given):
            raise UserError("no-texts", "give texts to embed, or a file and --out")
        with encoder.ready() as (predict, ranks):
            return encoder.embed(given, predict, ranks)[0]
    if not isinstance(texts, str | Path):
        raise UserError(
            "conflicting-options", "`out` needs a file of texts; leave `out` out, and the vectors are returned"
        )
    file, survey, vectors = open_job(encoder, texts, out, column=column, id_column=id_column)
    return _embed_file(encoder, file, survey, vectors)


def open_job(
    encoder: Encoder, texts: str | Path, out: str | Path, *, column: str = "text", id_column: str = ""
) -> tuple[TextFile, Survey, VectorFile]:
    """Read the texts once and look at `out`; refuses what would fail. Nothing is written."""
    if Path(out).suffix not in SUFFIXES:
        raise UserError("unknown-format", f"--out {out} must end in .parquet or .npy")
    if Path(texts).is_dir():
        raise UserError("unknown-table-format", f"{texts} is a folder; name one file of texts")
    file = TextFile(Path(texts), column, id_column)
    survey = file.survey()
    if id_column and Path(out).suffix == ".npy":
        raise UserError("option-without-effect", f"{out} has no ids; leave --id out, or name a .parquet file as --out")
    return file, survey, VectorFile(Path(out), survey.num_texts, encoder.settings.model.hidden_size, survey.has_ids)


def _embed_file(encoder: Encoder, file: TextFile, survey: Survey, vectors: VectorFile) -> Embedded:
    pipeline, train = encoder.pipeline, encoder.settings.train
    job = {
        "texts": survey.sha256, "text": file.column, "id": file.id_column, "weights": encoder.weights.fingerprint,
        "pooling": pipeline.pooling, "normalize": pipeline.normalize, "max_seq_length": pipeline.max_seq_length,
        "precision": train.precision, "shard_rows": SHARD_ROWS,
    }  # fmt: skip
    done = Embedded(
        str(vectors.out), survey.num_texts, vectors.width, pipeline.pooling, pipeline.normalize,
        pipeline.max_seq_length, train.precision, truncated=0, texts_per_s=0.0,
    )  # fmt: skip
    if is_first_rank() and vectors.check(job):
        vectors.clean_up()  # killed after the file was complete
    if vectors.out.exists():
        return done
    with encoder.ready() as (predict, ranks):
        if ranks.is_first:
            vectors.begin(job)
            if survey.num_empty:
                remark(f"{counted(survey.num_empty, 'text')} of {file.path} without words: each gets a vector, too")
        ranks.heartbeat.enter("embedding")
        ranks.broadcast_int(0)
        missing = [number for number in range(vectors.num_shards) if not vectors.has_shard(number)]
        if ranks.is_first and len(missing) < vectors.num_shards:
            remark(f"continuing: {vectors.num_shards - len(missing)} of {vectors.num_shards} parts are done")
        own = {number for number in missing if number % ranks.world == ranks.rank}
        began, num_texts, num_truncated = perf_counter(), 0, 0
        with reporting(predict, min(len(own) * SHARD_ROWS, survey.num_texts)) as reported:
            for number, rows in in_background(_shards(file, own, ranks.heartbeat), 2):
                of_shard, truncated = encoder.embed([row.text for row in rows], reported, ranks)
                vectors.write_shard(number, [row.id for row in rows], of_shard)
                num_texts, num_truncated = num_texts + len(rows), num_truncated + truncated
        ranks.heartbeat.enter("saving")
        ranks.broadcast_int(0)
        if ranks.is_first:
            vectors.join()
        if ranks.is_connected:  # and so a barrier: what all ranks did, once the file is whole
            num_texts, num_truncated = (
                int(sum(counts)) for counts in zip(*ranks.all_gather_rows([num_texts, num_truncated]), strict=True)
            )
        speed = num_texts / (perf_counter() - began)
    return replace(done, truncated=num_truncated, texts_per_s=speed)


def _shards(file: TextFile, own: set[int], heartbeat: Heartbeat) -> Iterator[tuple[int, list[Text]]]:
    """The shards that this rank embeds: number and rows. Others are read too, to skip them."""
    rows = iter(file)
    for number in range(max(own, default=-1) + 1):
        heartbeat.move()
        of_shard = list(islice(rows, SHARD_ROWS))
        if number in own:
            yield number, of_shard
