"""Writes docs/reference.md from the code: settings, recipes, commands, functions, and the layout of every folder.

usage: python docs/make_reference.py

What can be read off the code is read off it, such as the records of metrics.jsonl and the docstrings of their fields.
Other files and their fields are listed here, and tests/docs/test_documents.py compares the lists with a real run.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

import bertrain
from bertrain.base.errors import EXIT_CODES
from bertrain.cli.main import app
from bertrain.config import resolve as config
from bertrain.config.recipe import list_recipes
from bertrain.config.settings import SECTIONS, TrainSettings
from bertrain.run import records

HERE = Path(__file__).parent
RECORDS = (records.StepRecord, records.EvaluationRecord, records.RanksRecord, records.EndRecord)

DATA_FOLDER = {
    "manifest.json": "what the folder holds, written last; its SHA-256 is the identity of the data",
    "vocab.txt": "the vocabulary, a word per line; the line number, from 0, is the word's number. Data of another "
    "tokenizer has its tokenizer.json and tokenizer_config.json instead",
    "shard-00000.arrow": "examples, an Apache Arrow IPC file; as many of them as are needed",
}
MANIFEST_FIELDS = {
    "schema_version": "version of this layout",
    "rows": "examples in all files together",
    "tokens": "tokens in all examples, [CLS] and [SEP] included",
    "masks": "dynamic: drawn at load, new each epoch; static: drawn at preparation, stored in the rows",
    "vocabulary": "`size`, `lower_case`, and the `sha256` of words and case rule",
    "preparation": "how the examples were made: `inputs`, `mode`, the options of the mode, and counts of the `text`",
    "length_histogram": "number of examples of each length",
    "files": "`name`, `rows`, `bytes` and `sha256` of each shard",
}
SHARD_COLUMNS = {
    "tokens": "list of uint16 (uint32 beyond 65,536 words): [CLS] A [SEP] B [SEP], unmasked",
    "segment_b": "uint32: where segment B begins",
    "is_random": "bool: whether B was drawn from another document; the next-sentence label",
}
RUN_FOLDER = {
    "config.json": "the resolved settings, which data it was (folder and fingerprint), the weights it began with, and "
    "what `--budget` fitted",
    "environment.json": "one entry for each start: time, machine, ranks, versions, predicted step time",
    "vocab.txt": "the vocabulary, so that the weights can be used without the data; or, as in the data, tokenizer.json",
    "generator": "with `data.generator`: a copy of these weights",
    "metrics.jsonl": "one JSON object per line: every step once, every evaluation, the times of each rank, the end",
    "logs": "`rank-N.jsonl`: what each rank said (`bertrain logs` reads it), 8 MiB and as much in `rank-N.jsonl.1`",
    "tensorboard": "the same numbers as TensorBoard events; absent with `--log.trackers none`",
    "checkpoints": "the newest `checkpoint.keep` checkpoints, the best and a `best.json` that names it if asked for; "
    "`damaged-step-...` was passed over, `aside-...` was put aside by `resume --from-step`",
    "report.html": "the page that `bertrain report` writes",
    ".lock": "held by the process that trains here",
}
ENVIRONMENT_FIELDS = {
    "started": "local time with its offset",
    "host": "name of the machine of the first rank",
    "cores": "cores this process may use",
    "ranks": "ranks in all",
    "threads": "CPU threads of one rank",
    "device": "the GPU's name, or the processor's",
    "python": "version",
    "torch": "version",
    "numpy": "version",
    "bertrain": "version",
    "predicted_step_ms": "milliseconds of a step by `bertrain plan`'s model; null if it does not know the device",
}
CHECKPOINT = {
    "model.safetensors": "weights by parameter name, fp32",
    "optimizer.safetensors": "the optimizer's buffers by parameter name, such as `first_moment/NAME`",
    "state.json": "the counters and settings below; there is no random state to keep",
    "manifest.json": "size and SHA-256 of the three; written last",
}
STATE_FIELDS = {
    "schema_version": "version of this layout",
    "step": "optimizer steps done",
    "samples": "examples trained on or left out; also the position of the next one",
    "tokens": "real tokens trained on",
    "updates": "steps applied, with those of a run whose moments were kept; others were not finite, or left out",
    "seconds": "time in the loop, over all starts, evaluations and saves included",
    "evaluation_seconds": "of these, in evaluations",
    "saving_seconds": "of these, waiting for checkpoints",
    "best_step": "the step of the best evaluation so far; 0: none",
    "best_accuracy": "its masked-word accuracy",
    "settings": "those of the run, so that another run refuses it by name",
}
LOG_FIELDS = {
    "time": "seconds since the epoch, by the clock of the rank's machine",
    "level": "`info`, `warning` or `error`",
    "event": "`start`, `said`, `steps`, `warning`, `hang`, `restart`, `stop` (by a user error or a signal), `failure`, "
    "`end`",
    "text": "the line itself",
    "lost_before": "lines before this one that could not be written; absent if none",
}
TELEMETRY_FILES = {
    "telemetry.csv": "a row a sample, of the first rank's device; `telemetry-3.csv` of rank 3",
    "telemetry.json": "an entry for each start: device, columns, what is missing and why, when the system's clock was "
    "set, joules, and which share of a core the sampling took",
}
TELEMETRY_COLUMNS = {
    "time": "Unix seconds, by a clock that never runs backwards: that of `ended` in metrics.jsonl",
    "monotonic": "seconds of the machine's monotonic clock at the same moment",
    "sm_clock_mhz": "GPU: clock of its multiprocessors",
    "memory_clock_mhz": "GPU: clock of its memory",
    "power_w": "GPU: watts",
    "power_limit_w": "GPU: the limit in force",
    "temperature_c": "GPU: degrees Celsius",
    "gpu_utilisation": "GPU: share of time in which any kernel ran",
    "memory_utilisation": "GPU: share of time in which its memory was read or written",
    "memory_used_bytes": "GPU: of all processes",
    "throttle_reasons": "GPU: why the clock is held back, NVML's bits",
    "energy_j": "joules since some moment: of the GPU, once a second; of all processor packages (RAPL) on a CPU",
    "core0_mhz": "CPU: clock of core 0, and so on for each core that the process may use",
    "rss_bytes": "the process's memory",
    "cpu_utilisation": "share of all cores' time that was busy, by whatever process",
}
SET_FILES = {
    "iterations.csv": "each timed step",
    "launches.csv.gz": "each kernel, copy and setting of memory in the recorded steps; on a CPU each operator, without "
    "the time of those that it called",
    "kernels.csv": "the same by name: calls, total, mean, median, share of the whole",
    "roofline.csv": "the same by part of the model: what it must do, its floor, its time, the share of the floor",
    "telemetry.csv": "as in a run folder, from just before the first timed step to the end",
    "telemetry.json": "as in a run folder",
    "device.json": "device, UUID, driver, versions, settings, ceilings, which steps were timed and recorded, what is "
    "missing",
    "trace.json.gz": "with `--trace`: the recorded steps for Perfetto, with named regions",
}
ITERATION_FIELDS = {
    "step": "its number, counted from the beginning of the set",
    "started": "when it began, on the device, in Unix seconds",
    "seconds": "how long it took, by events on the device",
    "data_s": "of these, waiting for data",
    "forward_backward_s": "of these, forward and backward",
    "reduction_s": "of these, what was left of the sum over ranks",
    "optimizer_s": "of these, the update",
    "tokens": "real tokens, all ranks together",
    "own_tokens": "of this rank",
    "bins": "of this rank",
}
LAUNCH_FIELDS = {
    "start_ns": "when it began on the device, Unix time in nanoseconds",
    "duration_ns": "how long it took",
    "stream": "CUDA's stream; on a CPU the thread",
    "kind": "kernel, copy, set, or operator",
    "region": "data, forward, backward, all-reduce or optimizer; empty: outside of all",
    "grid": "blocks, as 128x1x1",
    "block": "threads of a block",
    "name": "of the kernel or operator",
}


def reference() -> str:
    """The whole page."""
    parts = [
        "# Reference",
        "",
        "Written by `python docs/make_reference.py` from the code; edit that, not this. A test compares the two.",
        "",
        "Commands, settings, recipes, Python functions, and the files of a data folder, a run folder and a checkpoint.",
        "",
        *_commands(),
        *_settings(),
        *_recipes(),
        *_functions(),
        *_layouts(),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


# --- commands ----------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its Typer object, in the order of the code; those for scripts alone are left out."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        leaves = {f"{name} {inner}": leaf for inner, leaf in getattr(command, "commands", {}).items()}
        yield from ((full, leaf) for full, leaf in (leaves or {name: command}).items() if not leaf.hidden)


def _commands() -> Iterator[str]:
    yield from ("## Commands", "")
    yield (
        "An error that the user can fix ends a command with one sentence, a [code](errors.md) and exit code 2. "
        "`bertrain COMMAND --help` prints the same. Commands that train take short options for some settings; every "
        "other setting is given as `--section.field VALUE`."
    )
    yield from ("", "### Exit codes", "")
    yield from _table(("code", "meaning"), [(f"{code}", meaning) for code, meaning in EXIT_CODES.items()])
    for name, command in commands():
        text, _, example = inspect.cleandoc(command.help).partition("Example:")
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        usage = " ".join(["bertrain", name, *map(_argument_name, arguments), "[OPTIONS]"])
        yield from (f"### bertrain {name}", "", " ".join(text.split()), "", f"    {usage}", "")
        yield from (f"Example: `{' '.join(example.split())}`", "")
        shown = [one for one in command.params if not getattr(one, "hidden", False)]
        rows = [(_parameter_name(one), _default(one), one.help or "") for one in shown]
        yield from _table(("argument or option", "default", "meaning"), rows)


def _argument_name(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _parameter_name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_argument_name(parameter)}`"
    return " / ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default is None or parameter.default is False:
        return ""
    if parameter.default is True:
        return f"`{parameter.opts[0]}`"
    return f"`{parameter.default}`"


# --- settings and recipes ---------------------------------------------------------------------------


def _settings() -> Iterator[str]:
    yield from ("## Settings", "")
    yield (
        "Give a setting on the command line as `--section.field VALUE`, or in a TOML file as `field = value` under "
        "`[section]`. A recipe overrides these defaults, a file given with `--settings` overrides the recipe, and the "
        "command line overrides both. `bertrain resume` may change the settings marked *yes*; the others shape the "
        "training, so another value needs a new run. Experimental settings are for benchmarks and comparisons."
    )
    yield ""
    for section, kind in SECTIONS.items():
        yield from (f"### {section}", "", inspect.cleandoc(kind.__doc__ or ""), "")
        hints = get_type_hints(kind)
        rows = []
        for entry in config.describe(section):
            name = entry["name"].partition(".")[2]
            limits = kind.__dataclass_fields__[name].metadata
            rows.append(
                (
                    f"`{entry['name']}`",
                    f"`{_toml(entry['default'])}`",
                    _values(hints[name], limits["minimum"], limits["maximum"])
                    + (", or 0" if limits["or_zero"] else ""),
                    f"(experimental) {entry['help']}" if entry["experimental"] else entry["help"],
                    "" if entry["shapes_training"] else "yes",
                )
            )
        yield from _table(("setting", "default", "values", "meaning", "resume may change it"), rows)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _values(hint: Any, minimum: float | None, maximum: float | None) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    kind = {int: "whole number", float: "number", bool: "true, false", str: "text"}[hint]
    if minimum is not None and maximum is not None:
        return f"{kind}, {minimum} to {maximum}"
    if minimum is not None:
        return f"{kind}, at least {minimum}"
    return f"{kind}, at most {maximum}" if maximum is not None else kind


def _recipes() -> Iterator[str]:
    yield from ("## Recipes", "")
    yield (
        "`bertrain recipes NAME` prints one with everything it builds on. A `.toml` file of your own can be used in "
        'its place; it may build on a recipe with `base = "NAME"` as its first line.'
    )
    yield ""
    rows = []
    for recipe in list_recipes():
        settings = config.resolve(recipe.name)
        model, batch, rate = settings.model, settings.batch, settings.optimizer.learning_rate
        size = f"{batch.sequences:,} sequences" if batch.sequences else f"{batch.tokens:,} tokens"
        rows.append(
            (
                f"`{recipe.name}`",
                recipe.headline,
                "of the weights" if settings.task.name else f"{model.num_layers} x {model.hidden_size}",
                str(settings.data.max_seq_length or "of the data"),
                size,
                _length_of(settings.train),
                f"{settings.optimizer.name}, {'by width' if rate < 0 else f'{rate:g}'}",
            )
        )
    yield from _table(("name", "description", "layers x width", "length", "step", "steps", "optimizer, rate"), rows)


def _length_of(train: TrainSettings) -> str:
    if train.epochs:
        return f"{train.epochs:g} epochs"
    return train.budget or train.max_time or f"{train.max_steps:,}"


def _functions() -> Iterator[str]:
    yield from ("## Python functions", "")
    yield "All of them are attributes of the package: `import bertrain`, then `bertrain.prepare(...)`."
    yield ""
    for name in bertrain.__all__:
        function = getattr(bertrain, name)
        if inspect.isfunction(function):
            # Annotations are strings here, so they are shown in quotes; a reader wants them without.
            signature = re.sub(r"(: |-> )(['\"])(.*?)\2(?=[,) ]|$)", r"\1\3", str(inspect.signature(function)))
            text = inspect.cleandoc(function.__doc__ or "")
            yield from (f"### bertrain.{name}", "", f"    {name}{signature}", "", text, "")


# --- what lies where ----------------------------------------------------------------------------------


def _layouts() -> Iterator[str]:
    yield from ("## A data folder", "", "Made by `bertrain data prepare`, whole or not at all.", "")
    yield from _named("file", DATA_FOLDER)
    yield from ("Fields of its `manifest.json`:", "", *_named("field", MANIFEST_FIELDS))
    yield from ("Columns of a shard:", "", *_named("column", SHARD_COLUMNS))
    yield from (
        "## A run folder",
        "",
        "Made by `bertrain pretrain`; every command that continues, reports or exports takes it.",
        "",
    )
    yield from _named("file or folder", RUN_FOLDER)
    yield from ("Fields of an entry of `environment.json`:", "", *_named("field", ENVIRONMENT_FIELDS))
    yield from ("### metrics.jsonl", "")
    yield "One JSON object per line, of these kinds. A number that is not finite is written as null."
    yield ""
    for kind in RECORDS:
        yield from (f"{kind.__doc__} `kind`: `{kind.kind}`.", "", *_named("field", record_fields(kind)))
        if kind is records.EvaluationRecord:
            yield from ("Metrics of an evaluation of pre-training:", "")
            yield from _named("metric", records.PRETRAINING_METRICS)
            yield from ("Entries of `by_class`:", "", *_named("field", record_fields(records.ClassScores)))
            yield from ("`bertrain evaluate --json` prints the same without `kind` and `samples`.", "")
        if kind is records.RanksRecord:
            yield from ("Entries of `ranks`:", "", *_named("field", record_fields(records.RankMeans)))
    yield from ("### logs/rank-N.jsonl", "", "One JSON object per line; beside these, fields of the event:", "")
    yield from _named("field", LOG_FIELDS)
    yield from ("### With --telemetry", "", *_named("file", TELEMETRY_FILES))
    yield from ("Columns of telemetry.csv; those that a machine does not give are not there:", "")
    yield from _named("column", TELEMETRY_COLUMNS)
    yield from ("## A set of a profile", "")
    yield from ("`DIR/HOST-DEVICE/repeat-N`, made by `bertrain profile`, whole or not at all.", "")
    yield from _named("file", SET_FILES)
    yield from ("Columns of iterations.csv:", "", *_named("column", ITERATION_FIELDS))
    yield from ("Columns of launches.csv.gz:", "", *_named("column", LAUNCH_FIELDS))
    yield from ("## A checkpoint", "")
    yield (
        "A folder `checkpoints/step-00000500`, written beside its place and renamed when it is whole. It knows no "
        "number of ranks, and nothing in it is a pickle. Each file is compared with its SHA-256 before it is trusted."
    )
    yield from ("", *_named("file", CHECKPOINT))
    yield from ("Fields of its `state.json`:", "", *_named("field", STATE_FIELDS))


def record_fields(kind: type[Any]) -> dict[str, str]:
    """The fields of a record and the docstring of each, which stands below it in the code."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    documented = {}
    for field, docstring in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(docstring, ast.Expr):
            documented[ast.unparse(field.target)] = " ".join(ast.literal_eval(docstring.value).split())
    return documented


def _named(title: str, meanings: dict[str, str]) -> Iterator[str]:
    return _table((title, "meaning"), [(f"`{name}`", meaning) for name, meaning in meanings.items()])


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """A Markdown table and the blank line after it."""
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


if __name__ == "__main__":
    (HERE / "reference.md").write_text(reference(), encoding="utf-8")
