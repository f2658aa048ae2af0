"""`bertrain train`: one command from text to a model, by calling the functions of other commands in order.

OUT/plan.json     the request, written first, and the choices, written before the training
OUT/text          `data extract`: the text, a sentence per line, and held-out documents
OUT/vocab.txt     `data vocab`
OUT/data          `data prepare`: the examples to train on
OUT/held-out      the examples to evaluate on
OUT/generator     `pretrain`: for the sizes base and large, the run of a smaller BERT that replaces words
OUT/run           `pretrain`: the run
OUT/task          `finetune`: the run of --task
OUT/report.html   `report`
OUT/model         `weights export`: a Transformers folder with a model card
OUT/recipe.toml   the run as a recipe, which `pretrain` repeats

A stage whose result exists is not repeated, and each writes its result completely or not at all. So the same command
continues after an interruption at any point.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from bertrain.base.console import tell
from bertrain.base.errors import UserError
from bertrain.base.files import HUB_PREFIX, write_atomically, writing
from bertrain.base.formatting import BASELINE, compact, counted, duration, show_brief, title_of, wrap
from bertrain.base.machine import is_first_rank, under_launcher
from bertrain.base.schema import Count, JsonError, load_json
from bertrain.config.choices import DocumentEnd, OnError, Size
from bertrain.config.model_size import count_parameters
from bertrain.config.resolve import to_toml
from bertrain.config.settings import ModelSettings, Settings
from bertrain.data.text.documents import EXTRACT_DESCRIPTION, EXTRACT_TRAINING
from bertrain.data.text.survey import survey
from bertrain.pipeline.folder import CONTINUE, locked, read_begun, write_begun
from bertrain.pipeline.plan import (
    GENERATOR,
    HELD_OUT,
    Machine,
    Text,
    TrainingPlan,
    plan_training,
    refuse_too_little,
)
from bertrain.pipeline.request import Request, check_request, make_request
from bertrain.run.folder import TRAIN_PLAN, Run
from bertrain.run.records import EndRecord, EvaluationRecord, last_record

ARGUMENTS = {"inputs": "TEXT", "evaluation_share": "--eval"}  # of a request, by its fields
VOCABULARY_BYTES = 100 << 20  # of text, in evenly spaced documents: more text hardly changes the vocabulary
USEFUL = 1.2  # times the baseline accuracy: below this, a model has learned little but word frequencies

RECIPE_HEAD = """# Repeats the run of `bertrain train` to the bit (on a GPU: if it was trained with --deterministic):
# {again}
#
# train.fits: how --budget set the length of the run. "4:90,30:84" means: after step 4 the run was to end with step 90,
# after step 30 with step 84. The learning rate follows these ends. To train longer, delete train.fits and set
# train.max_steps, or train.budget.
"""


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
    """Of the training, with the generator's, without the task's."""


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
    text_column: str = "auto",
    encoding: str = "auto",
    document_end: DocumentEnd = "auto",
    on_error: OnError = "stop",
    overrides: Sequence[tuple[str, str]] | Mapping[str, str] = (),
    nproc: int = 0,
) -> Trained:
    """Train a BERT on text of any form, in about `budget` of training time, into the folder `out`.

    `evaluation_share` of the documents are held out. `task`, such as "classify=labels.csv", fine-tunes the result.
    `overrides` are settings that replace the choices. `nproc`: ranks to start; 0: one for each GPU.
    Called again with the same arguments, it continues. Called by ranks, the first one prepares the text for all.

    Example: bertrain.train("articles", "my-bert", budget="30m")
    """
    request = make_request(locals())
    out = Path(out)
    check_request(request, out)
    with locked(out, TRAIN_PLAN, "text", "vocab.txt") if is_first_rank() else nullcontext():
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
    request = make_request({"inputs": inputs, **wishes})
    check_request(request, Path(out))
    survey(request.inputs, encoding=request.encoding, text_column=request.text_column)


def dry_run(inputs: str | Path | Iterable[str | Path], out: str | Path, *, nproc: int = 0, **wishes: Any) -> list[str]:
    """What `train` would choose, in lines; the text is estimated from a sample, and nothing is written."""
    from bertrain.data.text.extract import estimate

    request = make_request({"inputs": inputs, **wishes})
    check_request(request, Path(out))
    if kept := _kept_plan(request, Path(out)):
        return [f"{out}: to be continued, with the choices in {Path(out) / TRAIN_PLAN}", *kept.lines()]
    said, counts = estimate(request.inputs, **request.reading)
    chosen = _choose(counts, request, nproc).lines()
    return [*(wrap(line) for line in said), "chosen, from a sample of the text:", *chosen]


# --- the plan ---------------------------------------------------------------------------------------------------


def _kept_plan(request: Request, out: Path) -> TrainingPlan | None:
    """The plan in OUT, if there is one, with the request's present settings of `log`."""
    advice = f"; --init {quote(str(out / 'run'))} starts from its weights"
    kept = read_begun(out / TRAIN_PLAN, request, {"plan": TrainingPlan | None}, ARGUMENTS, advice)
    plan: TrainingPlan | None = kept.get("plan")
    if plan is None:
        return None
    before = dict(kept["request"].get("overrides", ()))
    overrides = {key: value for key, value in plan.overrides.items() if key not in before or not key.startswith("log.")}
    overrides |= {key: value for key, value in request.overrides if key.startswith("log.")}
    return replace(plan, overrides=overrides)


def _plan(request: Request, out: Path, nproc: int) -> TrainingPlan:
    """The plan in OUT, or a new one after the text is extracted and counted."""
    if kept := _kept_plan(request, out):
        tell(f"{out}: continuing, with the choices in {out / TRAIN_PLAN}")
        return kept
    write_begun(out / TRAIN_PLAN, request, plan=None)  # so that after a kill no other request continues with this text
    try:
        plan = _choose(_extract(request, out), request, nproc)
    except UserError:
        shutil.rmtree(out / "text", ignore_errors=True)  # other options may read the text otherwise
        (out / TRAIN_PLAN).unlink()
        raise
    print("\n".join(["chosen:", *plan.lines()]))
    write_begun(out / TRAIN_PLAN, request, plan=asdict(plan))
    return plan


def _wait_for_plan(request: Request, out: Path) -> TrainingPlan:
    """The plan, once the first rank has made it and prepared the data; if that fails, the launcher ends this rank."""
    while not all((out / name).exists() for name in (TRAIN_PLAN, "data", HELD_OUT)):
        time.sleep(0.5)
    plan = _kept_plan(request, out)
    assert plan is not None
    return plan


def _choose(counts: Mapping[str, int], request: Request, nproc: int) -> TrainingPlan:
    return plan_training(
        Text(counts["documents"], counts["sentences"], counts["characters"]),
        measure_machine(dict(request.overrides).get("train.device", "auto"), nproc),
        budget=request.budget,
        size=request.size,
        init=request.init,
        initial=_initial_model(request.init),
        given=request.settings(of_task=False),
    )


def _initial_model(init: str) -> ModelSettings | None:
    """The model of the initial weights; None without any, or if they must be downloaded from the Hub first."""
    from bertrain.weights.source import open_source

    return None if not init or init.startswith(HUB_PREFIX) else open_source(init, hashes=False).settings


# --- text to examples -------------------------------------------------------------------------------------------


def _read_extracted(path: Path) -> dict[str, Any]:
    try:
        extracted: dict[str, Any] = load_json(
            path, {"counts": dict[str, Count], "skipped": dict[str, Count], "survey": {}}
        )
        return extracted
    except (OSError, JsonError) as error:
        raise UserError("damaged-file", f"{path} is damaged ({error}); remove its folder") from None


def _extract(request: Request, out: Path) -> dict[str, int]:
    """Extract the text, unless it is there, and return its counts."""
    from bertrain.data.text.extract import extract

    done = out / "text" / EXTRACT_DESCRIPTION
    if not done.is_file():
        try:
            share, workers = request.evaluation_share, _workers()
            extract(request.inputs, done.parent, deduplicate=True, hold_out=share, workers=workers, **request.reading)
        except UserError as error:
            if error.code == "too-little-text":  # too few documents to hold one out
                refuse_too_little(Text(documents=1, sentences=1, characters=survey(request.inputs).bytes))
            raise
    description = _read_extracted(done)
    counts, skipped = description["counts"], description["skipped"]
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
    found = f"{counts['documents']:,} documents, {compact(counts['characters'])} characters"
    tell(f"text: {found}{f'; left out: {left_out}' if left_out else ''}")
    return counts


def _prepare(plan: TrainingPlan, request: Request, out: Path) -> None:
    """Train the vocabulary, or take that of the weights, and turn the text into examples."""
    from bertrain.data.prepare.prepare import prepare
    from bertrain.data.text.progress import unit_progress
    from bertrain.data.text.vocabulary_training import train_vocabulary
    from bertrain.weights.source import open_source, vocabulary_of

    vocabulary, settings = out / "vocab.txt", plan.settings(out)
    lower_case = not request.cased
    if request.init:
        words = vocabulary_of(open_source(request.init), request.init)
        with writing(vocabulary, CONTINUE):
            words.save(vocabulary)
        lower_case = words.lower_case
    elif not vocabulary.is_file():
        parts = sorted((out / "text" / EXTRACT_TRAINING).iterdir())
        size, stride = plan.vocabulary_size, max(1, -(-sum(part.stat().st_size for part in parts) // VOCABULARY_BYTES))
        sample = f", from one of every {stride} documents" if stride > 1 else ""
        tell(f"vocabulary: training {size:,} word pieces{sample}")
        train_vocabulary(parts, vocabulary, size=size, lower_case=lower_case, fewer=True, stride=stride)
    for source, folder in ((out / "text" / EXTRACT_TRAINING, "data"), (out / "text" / "eval.txt", HELD_OUT)):
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
            tell(f"{folder}: {made['rows']:,} examples, {compact(made['tokens'])} tokens")


def _workers() -> int:
    return len(os.sched_getaffinity(0))


# --- training ---------------------------------------------------------------------------------------------------


def _pretrain(plan: TrainingPlan, request: Request, out: Path, nproc: int) -> None:
    if plan.generator and not _end_of(out / GENERATOR):
        tell(f"generator: training {plan.generator.recipe}, which will replace words for {plan.recipe}")
        _pretrain_in(out / GENERATOR, plan.generator, request, out, nproc)
    _pretrain_in(out / "run", plan, request, out, nproc)


def _pretrain_in(run: Path, plan: TrainingPlan, request: Request, out: Path, nproc: int) -> None:
    settings = plan.settings(out)
    num_ranks = _num_ranks(settings, nproc)
    if num_ranks > 1:
        arguments = ["pretrain", plan.recipe, "--data", str(out / "data"), "--run", str(run)]
        arguments += ["--init", request.init] if request.init else []
        _run_ranks(num_ranks, arguments, plan.overrides_in(out))
        return
    from bertrain.training.start import pretrain

    pretrain(settings, out / "data", run, init=request.init)


def _finetune(request: Request, out: Path, nproc: int) -> None:
    kind, _, file = request.task.partition("=")
    tell(f"task: fine-tuning for {kind} on {file}, beyond the --budget of the pre-training")
    settings = {"checkpoint.every_minutes": "1"} | request.settings(of_task=True)
    num_ranks = _num_ranks(Run.open(out / "run").settings, nproc)
    if num_ranks > 1:
        run = ["--run", str(out / "task"), "--init", str(out / "run")]
        _run_ranks(num_ranks, ["finetune", kind, "--data", file, *run], settings)
        return
    from bertrain.training.finetune import finetune
    from bertrain.training.task_settings import resolve_task

    finetune(resolve_task(kind, settings), file, out / "task", init=str((out / "run").resolve()))


def _num_ranks(settings: Settings, nproc: int) -> int:
    """How many ranks to start; 1: this process trains, alone or as one of several ranks."""
    return 1 if under_launcher() else nproc or _num_gpus(settings.train.device)


def _num_gpus(device: str) -> int:
    """The GPUs that a run takes; 1 where it computes on the CPU."""
    import torch

    return 1 if device == "cpu" else max(1, torch.cuda.device_count())


def _run_ranks(num_ranks: int, arguments: list[str], settings: Mapping[str, str]) -> None:
    from bertrain.launch.local import run_ranks

    given = [word for key, value in settings.items() for word in (f"--{key}", value)]
    if code := run_ranks(num_ranks, [*arguments, *given]):
        raise SystemExit(code)  # the ranks have said why


def measure_machine(device: str = "auto", nproc: int = 0) -> Machine:
    """The device that a run of `nproc` ranks uses, and its training speed, estimated from a matrix product."""
    import torch

    from bertrain.planning.speed import training_speed
    from bertrain.ranks.parallel import choose_device, count_ranks
    from bertrain.training.precision import choose_precision

    chosen, _ = choose_device(device)
    is_gpu = chosen.type == "cuda"
    name = torch.cuda.get_device_name(chosen) if is_gpu else f"CPU, {counted(_workers(), 'core')}"
    speed = training_speed(chosen, choose_precision(Settings().train, chosen)[0])
    num_gpus = count_ranks() if under_launcher() else min(nproc or _num_gpus(device), _num_gpus(device))
    return Machine(name, num_gpus if is_gpu else 1, speed, is_gpu)


# --- what is handed over ----------------------------------------------------------------------------------------


def _hand_over(plan: TrainingPlan, request: Request, out: Path) -> None:
    """Write the report, the Transformers folder with its card, and the recipe of the run."""
    from bertrain.reports.report import report
    from bertrain.weights.card import model_card
    from bertrain.weights.export import export
    from bertrain.weights.huggingface import CARD

    run = Run.open(out / "run")
    settings = run.settings
    # train.fits has what the budget made of the clock; train.max_steps would say another length
    length = replace(settings.train, budget="", max_steps=settings.train.last_step() or settings.train.max_steps)
    recipe = to_toml(replace(settings, batch=replace(settings.batch, auto=False), train=length))
    again = f"bertrain pretrain recipe.toml --data {quote(str(out / 'data'))} --run NEW"
    again += f" --init {quote(request.init)}" if request.init else ""
    with writing(out / "recipe.toml", CONTINUE):
        write_atomically(out / "recipe.toml", f"{RECIPE_HEAD.format(again=again)}\n{recipe}")
    report([out / "run"], out=out / "report.html")
    if not (out / "model").is_dir():
        export(out / "run", out / "model")
    extracted = _read_extracted(out / "text" / EXTRACT_DESCRIPTION)
    counts, survey = extracted["counts"], extracted["survey"]
    text = f"{counts['documents'] - counts['held_out']:,} documents, and {counts['held_out']:,} held out for evaluation"
    language = survey.get("language", "") if request.language == "auto" else request.language
    card = model_card(run, text=f"{text}; exact duplicates were left out.", language=language)
    with writing(out / "model" / CARD, CONTINUE):
        write_atomically(out / "model" / CARD, card)


def _results(out: Path) -> Trained:
    from bertrain.training.task_results import metrics_of

    evaluation = last_record(out / "run" / "metrics.jsonl", EvaluationRecord)
    ends = [_end_of(out / run) for run in (GENERATOR, "run")]
    return Trained(
        folder=out,
        model=out / "model",
        run=out / "run",
        report=out / "report.html",
        metrics=evaluation.metrics if evaluation else {},
        task_metrics=metrics_of(out / "task") if (out / "task").is_dir() else {},
        seconds=sum(end.loop_seconds for end in ends if end),
    )


def _end_of(run: Path) -> EndRecord | None:
    metrics = run / "metrics.jsonl"
    return last_record(metrics, EndRecord) if metrics.is_file() else None


def summary(made: Trained) -> list[str]:
    """The model, its quality, its files, how to use it, and the next command."""
    settings = Run.open(made.run).settings
    metrics, model = made.metrics, settings.model
    shape = f"{model.num_layers} x {model.hidden_size}, {count_parameters(model)[0] / 1e6:.1f} M parameters"
    learned, baseline = metrics["mlm_accuracy"], metrics["constant_accuracy"]
    lines = [
        f"made:     a BERT of {shape}, trained for {duration(made.seconds)}",
        f"quality:  {learned:.1%} of masked words predicted in {metrics['examples']:,.0f} held-out examples; "
        f"always the commonest: {baseline:.1%}",
    ]
    if learned < USEFUL * baseline:
        lines.append("warning:  it has learned little more than which words are common; give it a longer --budget")
    if made.task_metrics:
        main = next(iter(made.task_metrics))
        score, same = made.task_metrics[main], made.task_metrics.get(BASELINE + main)
        beside = "" if same is None else f"; always the same answer: {show_brief(main, same)}"
        lines.append(f"task:     {title_of(main)} {show_brief(main, score)} on held-out rows{beside}")
        if same is not None and score <= same:
            cure = "try `bertrain finetune` with --epochs 10"
            lines.append(f"warning:  the task's model is no better than one answer for every text; {cure}")
    lines.append(f"files:    {made.model} (Transformers), {made.report}, {made.folder / 'recipe.toml'}")
    lines = [wrap(line, indent=10) for line in lines]
    mask = Run.open(made.run).vocabulary().special[-1]
    lines.append(f"use:      from transformers import pipeline; pipeline('fill-mask', '{made.model}')('a {mask} .')")
    if made.task_metrics:
        return [*lines, f'next:     bertrain predict {quote(str(made.folder / "task"))} "a text"']
    finetune = f"bertrain finetune classify --init {quote(str(made.run))} --data labels.csv --run runs/labels"
    return [*lines, f"next:     {finetune}"]
