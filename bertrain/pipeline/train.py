"""`bertrain train`: one command from text to a model, by calling the verbs below it in order.

OUT/plan.json     what was asked for and chosen, written before the training
OUT/text          `data extract`: the text, a sentence per line, and held-out documents
OUT/vocab.txt     `data vocab`
OUT/data          `data prepare`: the examples to train on
OUT/held-out      the examples to evaluate on
OUT/run           `pretrain`: the run
OUT/task          `finetune`: the run of --task
OUT/report.html   `report`
OUT/model         `weights export`: a Transformers folder with a model card
OUT/recipe.toml   the run as a recipe, which `pretrain` repeats

A stage whose result is there is not repeated, and each writes its result whole: so the same command continues after
an interruption at any point.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.files import write_atomically
from bertrain.base.formatting import BASELINE, duration
from bertrain.base.machine import is_first_rank, under_launcher
from bertrain.base.units import parse_duration
from bertrain.config.choices import DocumentEnd, OnError
from bertrain.config.model_size import count_parameters
from bertrain.config.resolve import resolve, to_toml
from bertrain.config.settings import Settings
from bertrain.data.text.documents import EXTRACT_DESCRIPTION, EXTRACT_TRAINING
from bertrain.data.text.survey import check_language, survey
from bertrain.pipeline.card import model_card
from bertrain.pipeline.plan import Choice, Machine, Plan, Size, Text, make_plan, refuse_too_little
from bertrain.run.folder import TRAIN_PLAN, Run
from bertrain.run.records import EndRecord, EvaluationRecord, last_record
from bertrain.weights.hub import PREFIX, absolute

LOCK = ".lock"
VOCABULARY_FILES = 40  # of the extracted text, evenly strided: about 1 GB says enough about words
TASKS = ("classify",)
SCORES = ("accuracy", f"{BASELINE}accuracy")  # of a task
USEFUL = 1.2  # times the baseline: below, a model knows little but frequencies


@dataclass(frozen=True)
class Request:
    """What the user asked for; the same command continues, another one is refused."""

    inputs: tuple[str, ...]
    budget: str
    evaluation_share: float
    cased: bool
    language: str
    init: str
    size: Size
    task: str
    text_column: str
    encoding: str
    document_end: DocumentEnd
    on_error: OnError
    overrides: tuple[tuple[str, str], ...]

    def settings(self, *, of_task: bool) -> dict[str, str]:
        """The user's settings of the task, or all others."""
        return {key: value for key, value in self.overrides if key.startswith("task.") == of_task}

    def describe(self, field: str) -> str:
        """One wish as it was typed, with or without its option."""
        value = getattr(self, field)
        if field == "overrides":
            return " ".join(f"--{key} {item}" for key, item in value) or "no settings"
        option = {"inputs": "TEXT", "evaluation_share": "--eval"}.get(field, f"--{field.replace('_', '-')}")
        shown = " ".join(value) if isinstance(value, tuple) else str(value)
        return f"{option} {shown}" if shown else f"no {option}"


@dataclass(frozen=True)
class Trained:
    """What `train` made."""

    folder: Path
    model: Path
    """The folder that Transformers loads."""
    run: Path
    report: Path
    metrics: dict[str, float]
    """Of the last evaluation, on held-out text."""
    task_metrics: dict[str, float]
    seconds: float
    """Of the training, without the task's."""


def train(
    inputs: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    budget: str = "30m",
    evaluation_share: float = 0.05,
    cased: bool = False,
    language: str = "auto",
    init: str | Path = "",
    size: Size = "auto",
    task: str = "",
    text_column: str = "text",
    encoding: str = "auto",
    document_end: DocumentEnd = "auto",
    on_error: OnError = "stop",
    overrides: Sequence[tuple[str, str]] = (),
    nproc: int = 0,
) -> Trained:
    """Train a BERT on text of any form, in about `budget` of training time, into the folder `out`.

    `evaluation_share` of the documents are held out. `task`, such as "classify=labels.csv", fine-tunes the result.
    `overrides` are settings that stand above what is chosen. `nproc` ranks train on this machine; 0: one for each GPU.
    Called again with the same arguments, it continues. Called by ranks, the first one prepares the text for all.

    Example: bertrain.train("articles", "my-bert", budget="30m")
    """
    request = _request(locals())
    out = Path(out)
    _check(request, out)
    with _locked(out) if is_first_rank() else nullcontext():
        if is_first_rank():
            plan = _plan(request, out, nproc)
            _prepare(plan, request, out)
        else:
            plan = _wait_for_plan(request, out)
        _pretrain(plan, request, out, nproc)
        if is_first_rank():
            _hand_over(plan, request, out)
        if task:
            _finetune(request, out, nproc)
        return _results(out)


def check(inputs: str | Path | Iterable[str | Path], out: str | Path, **wishes: Any) -> None:
    """Refuse what `train` would refuse, before a job is submitted."""
    request = _request({"inputs": inputs, **wishes})
    _check(request, Path(out))
    survey(request.inputs, encoding=request.encoding, text_column=request.text_column)


def dry_run(inputs: str | Path | Iterable[str | Path], out: str | Path, **wishes: Any) -> list[str]:
    """What `train` would choose, in lines; the text is estimated from a sample, and nothing is written."""
    from bertrain.data.text.extract import estimate

    request = _request({"inputs": inputs, **wishes})
    _check(request, Path(out))
    if kept := _kept_plan(request, Path(out)):
        return [f"{out}: to be continued, with the choices in {Path(out) / TRAIN_PLAN}", *kept.lines()]
    said, counts = estimate(
        request.inputs,
        text_column=request.text_column,
        encoding=request.encoding,
        document_end=request.document_end,
        language=request.language,
        on_error=request.on_error,
    )
    text = Text(counts["documents"], counts["sentences"], counts["characters"])
    return [*said, "from a sample of the text:", *_choose(text, request).lines()]


# --- the plan ---------------------------------------------------------------------------------------------------


def _request(given: dict[str, Any]) -> Request:
    """The arguments of `train`, checked; paths are absolute, so that the command may be repeated from elsewhere."""
    values = {name: value for name, value in given.items() if name not in ("out", "nproc")}
    inputs = values["inputs"]
    paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    values["inputs"] = tuple(str(Path(path).resolve()) for path in paths)
    values["init"] = absolute(values["init"])
    values["overrides"] = tuple(map(tuple, values["overrides"]))
    request = Request(**values)
    if not 0 < request.evaluation_share < 1:
        share = f"--eval is {request.evaluation_share:g}"
        raise UserError("option-out-of-range", f"{share}; give a share above 0 and below 1, such as 0.05 or 5%")
    if not parse_duration(request.budget, "--budget"):
        raise UserError("invalid-duration", "--budget is empty; give a time such as 30m")
    if request.task:
        kind, _, file = request.task.partition("=")
        if kind not in TASKS or not file:
            raise UserError("bad-task", f"--task is {request.task!r}; use classify=FILE with a text and a label column")
        if not Path(file).exists():
            raise UserError("missing-data", f"--task {request.task}: there is no file {file}")
        request = replace(request, task=f"{kind}={Path(file).resolve()}")
    if request.init and request.size != "auto":
        raise UserError("conflicting-options", "--size and --init exclude each other: the weights have a size")
    return request


def _check(request: Request, out: Path) -> None:
    """Refuse, before anything is written, what a later stage would refuse: settings, weights and the task's table."""
    from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary
    from bertrain.tasks.registry import open_task
    from bertrain.training.task_settings import resolve_task
    from bertrain.weights.source import open_source

    check_language(request.language)
    place = out.resolve()
    for path in map(Path, request.inputs):
        if path in (place, *place.parents):
            raise UserError("output-in-input", f"--out {out} lies in the text {path}; choose a folder outside it")
    resolve("bert-tiny" if request.size == "auto" else f"bert-{request.size}", request.settings(of_task=False))
    if request.init and not request.init.startswith(PREFIX):
        open_source(request.init, hashes=False)
    if request.task:
        kind, _, file = request.task.partition("=")
        settings = resolve_task(kind, request.settings(of_task=True))
        task = open_task(settings, Path(file), Vocabulary(SPECIAL_WORDS, lower_case=not request.cased))
        task.training()
        task.held_out()


def _kept_plan(request: Request, out: Path) -> Plan | None:
    """The plan in OUT, if there is one; refuses that of another request."""
    path = out / TRAIN_PLAN
    if not path.is_file():
        return None
    kept = _read_plan(path)
    then = kept["request"]
    begun = replace(
        request,
        **{name: value for name, value in then.items() if name not in ("inputs", "overrides")},
        inputs=tuple(then["inputs"]),
        overrides=tuple(map(tuple, then["overrides"])),
    )
    if begun != request:
        name = next(name for name in asdict(request) if getattr(begun, name) != getattr(request, name))
        cure = f"repeat that, or choose another --out; --init {quote(str(out / 'run'))} begins with its weights"
        was = f"{out} was begun with {begun.describe(name)}, not with {request.describe(name)}"
        raise UserError("other-request", f"{was}; {cure}")
    return Plan(**kept["plan"] | {"choices": tuple(Choice(**one) for one in kept["plan"]["choices"])})


def _plan(request: Request, out: Path, nproc: int) -> Plan:
    """The plan in OUT, or a new one after the text is extracted and counted."""
    path = out / TRAIN_PLAN
    if kept := _kept_plan(request, out):
        print(f"{out}: continuing, with the choices in {path}")
        return kept
    description = _extract(request, out)
    counts = description["counts"]
    try:
        plan = _choose(Text(counts["documents"], counts["sentences"], counts["characters"]), request, nproc)
    except UserError:
        shutil.rmtree(out / "text")  # other options may read the text otherwise
        raise
    print("\n".join(["chosen:", *plan.lines()]))
    write_atomically(path, json.dumps({"request": asdict(request), "plan": asdict(plan)}, indent=1) + "\n")
    return plan


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return content
    except ValueError:
        raise UserError("damaged-file", f"{path} is damaged; choose another --out") from None


def _wait_for_plan(request: Request, out: Path) -> Plan:
    """The plan, once the first rank has made it and prepared the data; if that fails, the launcher ends this rank."""
    while not all((out / name).exists() for name in (TRAIN_PLAN, "data", "held-out")):
        time.sleep(0.5)
    plan = _kept_plan(request, out)
    assert plan is not None
    return plan


def _choose(text: Text, request: Request, nproc: int = 0) -> Plan:
    return make_plan(
        text,
        measure_machine(dict(request.overrides).get("train.device", "auto"), nproc),
        budget=request.budget,
        size=request.size,
        init=request.init,
        given=request.settings(of_task=False),
    )


# --- text to examples -------------------------------------------------------------------------------------------


def _extract(request: Request, out: Path) -> dict[str, Any]:
    from bertrain.data.text.extract import extract

    done = out / "text" / EXTRACT_DESCRIPTION
    if not done.is_file():
        try:
            extract(
                request.inputs,
                out / "text",
                text_column=request.text_column,
                encoding=request.encoding,
                document_end=request.document_end,
                language=request.language,
                on_error=request.on_error,
                deduplicate=True,
                hold_out=request.evaluation_share,
                workers=_workers(),
            )
        except UserError as error:
            if error.code == "too-little-text":  # too few documents to hold one out
                refuse_too_little(Text(documents=1, sentences=1, characters=survey(request.inputs).bytes))
            raise
    description: dict[str, Any] = json.loads(done.read_text())
    counts, skipped = description["counts"], description["skipped"]
    left_out = "".join(f", {count:,} {reason} left out" for reason, count in skipped.items())
    print(f"text: {counts['documents']:,} documents, {counts['characters'] / 1e6:,.1f} M characters{left_out}")
    return description


def _prepare(plan: Plan, request: Request, out: Path) -> None:
    """Train the vocabulary, or take that of the weights, and turn the text into examples."""
    from bertrain.data.prepare.prepare import prepare
    from bertrain.data.text.progress import unit_progress
    from bertrain.data.text.vocabulary_training import train_vocabulary
    from bertrain.weights.source import open_source

    vocabulary, settings = out / "vocab.txt", plan.settings(out / "held-out")
    lower_case = not request.cased
    if request.init:
        words = open_source(request.init).vocabulary
        if words is None:
            raise UserError("missing-vocabulary", f"{request.init} has no vocabulary; `weights import --vocab` adds it")
        words.save(vocabulary)
        lower_case = words.lower_case
    elif not vocabulary.is_file():
        parts = sorted((out / "text" / EXTRACT_TRAINING).iterdir())
        print(f"vocabulary: training {plan.vocabulary_size:,} word pieces")
        strided = parts[:: -(-len(parts) // VOCABULARY_FILES)]
        train_vocabulary(strided, vocabulary, size=plan.vocabulary_size, lower_case=lower_case, fewer=True)
    for source, folder in ((out / "text" / EXTRACT_TRAINING, "data"), (out / "text" / "eval.txt", "held-out")):
        if not (out / folder).is_dir():
            made = prepare(
                [source],
                out / folder,
                vocab=vocabulary,
                lower_case=lower_case,
                max_seq_length=settings.data.max_seq_length,
                full_sentences=not settings.model.nsp,
                workers=_workers(),
                progress=unit_progress(),
            )
            print(f"{folder}: {made['rows']:,} examples, {made['tokens'] / 1e6:,.1f} M tokens")


def _workers() -> int:
    return len(os.sched_getaffinity(0))


# --- training ---------------------------------------------------------------------------------------------------


def _pretrain(plan: Plan, request: Request, out: Path, nproc: int) -> None:
    settings = plan.settings(out / "held-out")
    num_ranks = _num_ranks(settings, nproc)
    if num_ranks > 1:
        arguments = ["pretrain", plan.recipe, "--data", str(out / "data"), "--run", str(out / "run")]
        arguments += ["--init", request.init] if request.init else []
        given = plan.overrides | {"evaluate.data": str(out / "held-out")}
        _run_ranks(num_ranks, [*arguments, *(word for key, value in given.items() for word in (f"--{key}", value))])
        return
    from bertrain.training.start import pretrain

    pretrain(settings, out / "data", out / "run", init=request.init)


def _finetune(request: Request, out: Path, nproc: int) -> None:
    kind, _, file = request.task.partition("=")
    settings = request.settings(of_task=True)
    num_ranks = _num_ranks(Run.open(out / "run").settings, nproc)
    if num_ranks > 1:
        run = ["--run", str(out / "task"), "--init", str(out / "run")]
        given = [word for key, value in settings.items() for word in (f"--{key}", value)]
        _run_ranks(num_ranks, ["finetune", kind, "--data", file, *run, *given])
        return
    from bertrain.training.finetune import finetune
    from bertrain.training.task_settings import resolve_task

    finetune(resolve_task(kind, settings), file, out / "task", init=str((out / "run").resolve()))


def _num_ranks(settings: Settings, nproc: int) -> int:
    """How many ranks to start; 1: this process trains, alone or as one of several ranks."""
    import torch

    if under_launcher() or settings.train.device == "cpu":
        return 1 if under_launcher() else max(1, nproc)
    return nproc or max(1, torch.cuda.device_count())


def _run_ranks(num_ranks: int, arguments: list[str]) -> None:
    from bertrain.launch.local import run_ranks

    if code := run_ranks(num_ranks, arguments):
        raise SystemExit(code)  # the ranks have said why


def measure_machine(device: str = "auto", nproc: int = 0) -> Machine:
    """The devices that a run takes, and how fast one trains, by the speed of a matrix product."""
    import torch

    from bertrain.base.machine import cpu_name
    from bertrain.planning.speed import training_speed
    from bertrain.ranks.parallel import choose_device, count_ranks
    from bertrain.training.precision import choose_precision

    chosen, _ = choose_device(device)
    is_gpu = chosen.type == "cuda"
    name = torch.cuda.get_device_name(chosen) if is_gpu else f"{cpu_name()}, {_workers()} cores"
    speed = training_speed(chosen, choose_precision(Settings().train, chosen)[0])
    local = (nproc or torch.cuda.device_count()) if is_gpu else 1  # ranks on a CPU share what was measured
    return Machine(name, count_ranks() if under_launcher() else local, speed, is_gpu)


# --- what is handed over ----------------------------------------------------------------------------------------


def _hand_over(plan: Plan, request: Request, out: Path) -> None:
    """Write the report, the Transformers folder with its card, and the recipe of the run."""
    from bertrain.reports.report import report
    from bertrain.weights.export import export

    settings = Run.open(out / "run").settings
    length = replace(settings.train, budget="")  # train.fits has what the budget made of the clock
    recipe = to_toml(replace(settings, batch=replace(settings.batch, auto=False), train=length))
    again = f"bertrain pretrain recipe.toml --data {quote(str(out / 'data'))} --run NEW"
    again += f" --init {quote(request.init)}" if request.init else ""
    write_atomically(out / "recipe.toml", f"# Repeats the run of `bertrain train`:\n# {again}\n\n{recipe}")
    report([out / "run"], out=out / "report.html")
    if not (out / "model").is_dir():
        export(out / "run", out / "model")
    results = _results(out)
    text = json.loads((out / "text" / EXTRACT_DESCRIPTION).read_text())["counts"]
    write_atomically(out / "model" / "README.md", model_card(settings, results.metrics, text, request.language))


def _results(out: Path) -> Trained:
    from bertrain.training.task_results import metrics_of

    metrics = out / "run" / "metrics.jsonl"
    evaluation, end = last_record(metrics, EvaluationRecord), last_record(metrics, EndRecord)
    return Trained(
        folder=out,
        model=out / "model",
        run=out / "run",
        report=out / "report.html",
        metrics=evaluation.metrics if evaluation else {},
        task_metrics=metrics_of(out / "task") if (out / "task").is_dir() else {},
        seconds=end.loop_seconds if end else 0.0,
    )


def summary(made: Trained) -> list[str]:
    """What was made, how good it is, where it lies, how to use it, what to do next."""
    settings = Run.open(made.run).settings
    metrics, model = made.metrics, settings.model
    shape = f"{model.num_layers} x {model.hidden_size}, {count_parameters(model)[0] / 1e6:.1f} M parameters"
    learned, baseline = metrics["mlm_accuracy"], metrics["constant_accuracy"]
    lines = [
        f"made:     a BERT of {shape}, trained for {duration(made.seconds)}",
        f"quality:  {learned:.1%} of the masked words predicted, in {metrics['examples']:,.0f} held-out examples; "
        f"always the commonest word: {baseline:.1%}",
    ]
    if learned < USEFUL * baseline:
        lines.append("warning:  it has learned little more than which words are common; give it a longer --budget")
    if made.task_metrics:
        scores = ", ".join(f"{name} {value:.3f}" for name, value in made.task_metrics.items() if name in SCORES)
        lines.append(f"task:     {scores}; {made.folder / 'task'}")
    lines += [
        f"files:    {made.model} (Transformers), {made.report}, {made.folder / 'recipe.toml'}",
        f"use:      from transformers import pipeline; pipeline('fill-mask', '{made.model}')('a [MASK] .')",
    ]
    if made.task_metrics:
        return [*lines, f'next:     bertrain predict {quote(str(made.folder / "task"))} "a text"']
    finetune = f"bertrain finetune classify --init {quote(str(made.run))} --data labels.csv --run runs/labels"
    return [*lines, f"next:     {finetune}"]


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The folder OUT, made if need be, and used by this process alone. Without a result, none is left behind."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / LOCK, "w")  # noqa: SIM115 - held until the end
    except OSError as error:
        raise UserError("unwritable-folder", f"cannot write {out}: {error.strerror or error}") from None
    with lock:
        known = {TRAIN_PLAN, LOCK, "text", "vocab.txt"}
        if not (out / TRAIN_PLAN).exists() and {path.name for path in out.iterdir() if path.name[0] != "."} - known:
            (out / LOCK).unlink()
            raise UserError("occupied-folder", f"{out} has other files; choose another --out, or remove them")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("already-running", f"another process is training in {out}; wait for it") from None
        try:
            yield
        finally:
            if {path.name for path in out.iterdir()} == {LOCK}:
                (out / LOCK).unlink()
                out.rmdir()
