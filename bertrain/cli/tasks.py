"""The commands about tasks: fine-tune, predict, score."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

from typer import Argument, Option

from bertrain.base.errors import UserError
from bertrain.base.formatting import wrap
from bertrain.base.machine import is_first_rank
from bertrain.cli import options
from bertrain.config.choices import EmbeddingPrecision, Pooling

app = options.new_app()


@app.command("finetune", context_settings=options.OVERRIDES)
@options.takes_settings((*options.TRAINING_OPTIONS, *options.TASK_OPTIONS))
def finetune(
    task: Annotated[
        str,
        Argument(
            metavar="TASK",
            help="glue/mnli and so on, glue (all), squad/v1.1, squad/v2.0, xnli, classify, tag or similarity",
        ),
    ],
    data: Annotated[Path, Option(help="the folder with the task's files, or a table")],
    run: Annotated[Path, Option(*options.RUN_OPTIONS, help="the run folder to create or continue")],
    overrides: options.Overrides,
    init: options.InitialWeights = None,
    do: Annotated[
        Literal["train", "predict"],
        Option(
            help="train: train and score; predict: also write predictions for the unlabeled data, or else the "
            "held-out part, into RUN/predictions"
        ),
    ] = "train",
    recipe: Annotated[str, Option(help="a recipe's name, or a .toml file; default: the recipe of the task")] = "",
    settings_file: options.SettingsFile = None,
    seeds: Annotated[
        str, Option(help="one run for each of several seeds, such as 1,2,3, with mean and standard deviation")
    ] = "",
    nproc: options.RankCount = 1,
    restarts: options.Restarts = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="print the resolved run and stop")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Fine-tune weights for a task and score the result; any setting can be given as --section.field VALUE.

    `glue` alone means all GLUE tasks whose folders exist. With --seeds, each run has its own folder in RUN.

    Example: bertrain finetune glue/sst2 --init weights/ --data glue/ --run runs/sst2
    """
    if as_json and dry_run:
        raise UserError(
            "conflicting-options", "--dry-run has no metrics to print as JSON; leave one of --json and --dry-run out"
        )
    options.cap_instructions(overrides)
    from bertrain.base.files import absolute
    from bertrain.training import finetune as tuning
    from bertrain.training import predict as predicting
    from bertrain.training import task_results, task_settings
    from bertrain.training.start import preflight

    resolved = {
        name: task_settings.resolve_task(name, overrides, recipe=recipe, settings_file=settings_file)
        for name in task_settings.expand_tasks(task, data)
    }
    options.prepare_process(next(iter(resolved.values())).train)
    beginning = absolute(init or "")
    numbers = parse_seeds(seeds) or [next(iter(resolved.values())).train.seed]
    counts = len(resolved), len(numbers)
    places = {name: [tuning.run_folder(run, name, seed, *counts) for seed in numbers] for name in resolved}
    if dry_run:
        from bertrain.training.announce import dry_run as describe

        for name, settings in resolved.items():
            text = describe(settings, data, run=places[name][0], world=options.world(nproc), init=beginning)
            if is_first_rank():
                print(text)
        return
    if options.starts_ranks(nproc, restarts):
        world, here = options.world(nproc), not options.is_launched()
        for name, settings in resolved.items():
            preflight(settings, data, places[name][0], init=beginning, world=world, here=here)
        runs = [place for several in places.values() for place in several]
        options.start_ranks(nproc, restarts, runs, settings=next(iter(resolved.values())), data=[data])
    with options.stdout_for_json(as_json):
        outcomes = tuning.finetune_many(resolved, data, run, init=beginning, seeds=numbers, predicts=do == "predict")
        shown = [one.to_dict() for one in outcomes]
        for one in shown if do == "predict" else []:
            one["predictions"] = {}
            for place in places[one["task"]]:
                which = task_results.checkpoint_of(place)
                one["predictions"][str(place)] = predicting.predict(place, data, place / "predictions", which=which)
    if not is_first_rank() or options.printed_json(shown, as_json):
        return
    for one in shown:
        for result in one.get("predictions", {}).values():
            show_predictions(result)
    print(task_results.table(outcomes))
    if task in ("classify", "tag"):
        texts = '"a text" "its second text"' if resolved[task].task.text_pair else '"a text"'
        print(f"next: bertrain predict {quote(str(places[task][0]))} {texts}")


def parse_seeds(text: str) -> list[int]:
    """The numbers in a list such as 1,2,3."""
    try:
        found = [int(word) for word in text.split(",")] if text else []
    except ValueError:
        raise UserError("invalid-seeds", f"--seeds is a list of whole numbers such as 1,2,3, not {text!r}") from None
    if any(seed < 0 for seed in found) or len(set(found)) < len(found):
        raise UserError("invalid-seeds", f"--seeds {text} has a seed twice, or one below 0; give each seed once")
    return found


@app.command("predict", context_settings=options.OVERRIDES)
@options.takes_settings(options.TASK_OPTIONS)
def predict(
    run: options.RunOrFineTuned,
    overrides: options.Overrides,
    texts: Annotated[
        list[str] | None, Argument(metavar="TEXT", help="texts to predict; for pairs, two texts each")
    ] = None,
    data: Annotated[Path | None, Option(help="the folder or file with the examples to predict")] = None,
    out: Annotated[Path | None, Option(help="the folder to write the predictions to")] = None,
    checkpoint: options.Checkpoint = "newest",
    device: options.Device = "auto",
    batch_size: options.BatchSize = 0,
    as_json: options.AsJson = False,
) -> None:
    """Predict texts with a fine-tuned model, or write predictions for --data in the official format of the task.

    --section.field VALUE changes the names of columns, and settings that `bertrain settings` marks with *.

    Example: bertrain predict runs/letters "Where can I see my invoice?"
    """
    from bertrain.training.predict import predict as predict_task

    texts = texts or []
    with options.stdout_for_json(as_json):
        result = predict_task(
            run, data, out, texts=texts, which=checkpoint, device=device, batch_size=batch_size, overrides=overrides
        )
    if not is_first_rank() or options.printed_json(result, as_json):
        return
    if not texts:
        show_predictions(result)
    size = len(texts) // max(1, len(result))  # 2 for a task of pairs
    for row, one in enumerate(result if texts else []):
        if "entities" in one:
            show_entities(one)
        else:
            print(f"{answer_text(one)}  {' | '.join(texts[row * size : (row + 1) * size])}")


def answer_text(answer: dict[str, Any]) -> str:
    """A number, or the predicted labels with their probabilities."""
    if "number" in answer:
        return f"{answer['number']:.4g}"
    labels = answer["labels"] if "labels" in answer else [answer["label"]]
    return ", ".join(f"{label} {answer['probabilities'][label]:.1%}" for label in labels) or "no label"


def show_entities(answer: dict[str, Any]) -> None:
    print(answer["text"])
    for entity in answer["entities"]:
        print(f"  {entity['label']} {entity['score']:.1%}  {entity['text']}  ({entity['start']}:{entity['end']})")


def show_predictions(result: dict[str, Any]) -> None:
    for name, split in result.items():
        speed = f"{split['examples']:,.0f} examples, {split['examples_per_s']:,.0f} a second"
        print(wrap(f"{name}: {speed}; wrote {', '.join(split['files'])}\n  {options.latency_text(split)}"))


@app.command("embed")
def embed(
    source: options.AnyWeights,
    texts: Annotated[
        Path, Argument(metavar="TEXTS", help=".txt with one text per line; or .csv, .tsv, .jsonl, .parquet")
    ],
    out: Annotated[Path, Option(help="the file to write: .parquet (ids and vectors) or .npy (vectors alone)")],
    column: Annotated[str, Option("--text", metavar="COLUMN", help="column of the texts in a table")] = "text",
    id_column: Annotated[str, Option("--id", metavar="COLUMN", help="column of ids; default: id, idx or index")] = "",
    pooling: Annotated[
        Pooling | None, Option(help="how to pool tokens; default: the model's own way, else mean")
    ] = None,
    normalize: Annotated[
        bool | None, Option(help="scale vectors to length 1; default: the model's own way, else yes")
    ] = None,
    max_length: Annotated[
        int, Option(min=0, help="most tokens of a text; 0: the model's own limit, else all it can read")
    ] = 0,
    precision: Annotated[EmbeddingPrecision, Option(help="auto: bf16 where the hardware supports it")] = "auto",
    checkpoint: options.Checkpoint = "newest",
    device: options.Device = "auto",
    nproc: options.RankCount = 1,
    as_json: options.AsJson = False,
) -> None:
    """Write one vector for each text, for search and clustering; if it is interrupted, the same command continues.

    A sentence-transformers folder and a run of `finetune similarity` define how to pool and normalize.

    Example: bertrain embed runs/tiny texts.jsonl --out vectors.parquet
    """
    from bertrain.training import embed as embedding

    wishes: dict[str, Any] = {"pooling": pooling, "normalize": normalize, "max_seq_length": max_length}
    wishes |= {"which": checkpoint, "precision": precision, "device": device}
    if options.starts_ranks(nproc):
        if options.is_launched():
            raise UserError("not-launchable", "`embed` runs on one machine; call it there, with --nproc N")
        embedding.open_job(embedding.Encoder.open(source, **wishes), texts, out, column=column, id_column=id_column)
        options.start_ranks(nproc)
    with options.stdout_for_json(as_json):
        done = embedding.embed(source, texts, out, column=column, id_column=id_column, **wishes)
    if not is_first_rank() or options.printed_json(done, as_json):
        return
    assert isinstance(done, embedding.Embedded)
    truncated = f"; {done.truncated:,} were truncated to {done.max_seq_length} tokens" if done.truncated else ""
    speed = f", {done.texts_per_s:,.0f} texts/s" if done.texts_per_s else ""
    print(f"{done.out}: {done.texts:,} vectors of {done.width}{speed}{truncated}")


@app.command("score")
def score(
    task: Annotated[str, Argument(metavar="TASK", help="squad/v1.1 or squad/v2.0")],
    data: Annotated[Path, Option(help="the file of questions and answers, such as dev-v1.1.json")],
    predictions: Annotated[Path, Option(help="the file of predictions: answers by question id, in JSON")],
    null_odds: Annotated[Path | None, Option(help="squad/v2.0: a file of no-answer scores by question id")] = None,
    null_threshold: Annotated[
        float | None, Option(help="--null-odds above this count as no answer; default: 1, as in SQuAD's script")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Score a file of predictions with exactly the results of the task's official script.

    Example: bertrain score squad/v1.1 --data dev-v1.1.json --predictions predictions.json
    """
    from bertrain.tasks.score import score as score_predictions

    metrics = score_predictions(task, data, predictions, null_odds=null_odds, null_threshold=null_threshold)
    if options.printed_json(metrics, as_json):
        return
    for name, value in metrics.items():
        print(f"{name}: {value}")
    if metrics.get("missing"):
        print(f"{metrics['missing']:,} questions have no prediction and count as wrong")
