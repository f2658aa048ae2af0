"""Many experiments, one after another: `bertrain mlperf run`.

    OUT/recipe.toml       the settings, resolved and frozen
    OUT/experiments/      an attempt each: its log and its run folder
    OUT/result_0.txt ...  whole logs

Each attempt is a process of its own (or `nproc` of them), so that whatever becomes of it, the next one begins afresh.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

from bertrain.base.errors import EXIT_REQUEUE, EXIT_USER_ERROR, ReportedElsewhereError, RequeueError, UserError
from bertrain.base.files import write_atomically
from bertrain.config.resolve import resolve, to_toml
from bertrain.config.settings import Settings
from bertrain.mlperf.check import Checked, check_results
from bertrain.mlperf.experiment import as_experiment, attempt_folder, check_settings, warn_of_settings
from bertrain.mlperf.log import read_log, require_library
from bertrain.mlperf.show import figures_of
from bertrain.run.folder import Run
from bertrain.training.agenda import evaluation_interval

RECIPE = "recipe.toml"


def run_experiments(
    settings: Settings,
    data: str | Path,
    out: str | Path,
    *,
    nexp: int = 10,
    init: str = "",
    nproc: int = 1,
    attempts: int = 3,
) -> Checked:
    """Train `nexp` times until evaluate.target_accuracy is reached, each under a seed of its own, and check the logs.

    Results that `out` holds already are kept. An attempt that dies is not counted: it is made again, under a new seed,
    up to `attempts` times. A run that does not converge counts as such.
    """
    require_library()
    check_settings(settings)
    settings, out = as_experiment(settings), Path(out)
    warn_of_settings(settings)
    init = str(Path(init).resolve()) if init else ""
    _preflight(settings, data, out, init, nproc)
    _freeze(settings, out, data, init)
    evaluate = settings.evaluate
    every = evaluation_interval(evaluate, settings.nominal_sequences)
    print(f"{nexp} experiment(s) into {out}, each under a seed of its own from the system's entropy", flush=True)
    print(f"  to an accuracy of {evaluate.target_accuracy:g}, asked for every {every:,} samples", flush=True)
    common = ["mlperf", "run", str(out / RECIPE), "--data", str(data), "--out", str(out)]
    common += ["--init", init] if init else []
    if settings.mlperf.probe_accuracy:
        _end_as(_start(nproc, [*common, "--only", "probe"]), "the probe")
    for number in range(nexp):
        result = out / f"result_{number}.txt"
        if result.is_file():
            print(f"experiment {number}: {result} is there and kept", flush=True)
            continue
        first = _first_attempt(out, number)
        for attempt in range(first, first + attempts):
            print(f"experiment {number} of 0 to {nexp - 1}, attempt {attempt}", flush=True)
            code = _start(nproc, [*common, "--only", str(number), "--attempt", str(attempt)])
            if result.is_file():
                break
            _end_as(code, f"experiment {number}", may_be_repeated=True)
            print(f"experiment {number}, attempt {attempt}, ended by {describe(code)}: not counted", flush=True)
        else:
            raise UserError(
                f"experiment {number} was begun {attempts} times and never came to its end; look into "
                f"{attempt_folder(out, number, attempt)}, then start the same command again"
            )
        print(f"experiment {number}: {tell(result)}", flush=True)
    return check_results(out)


def _first_attempt(out: Path, number: int) -> int:
    """The attempt that comes next, after those that an earlier command began; none of them may still be at it."""
    attempt = 1
    while (folder := attempt_folder(out, number, attempt)).exists():
        if (folder / "run" / "config.json").is_file():
            with Run.open(folder / "run").lock() as is_free:
                if not is_free:
                    raise UserError(f"the experiment in {folder} is still running; wait for it or end it")
        attempt += 1
    return attempt


def tell(result: Path) -> str:
    """A result in a few words."""
    log = read_log(result)
    figures, end = figures_of(log), log.first("run_stop")
    verdict = "converged"
    if not figures.has_converged:
        verdict = f"did not converge ({end.metadata['reason'] if end else log.status})"
    return (
        f"{verdict}; accuracy {figures.final_accuracy or 0:.4f} after {figures.train_samples or 0:,} samples in "
        f"{figures.time_to_train_s or 0:,.1f} s, seed {figures.seed}"
    )


def describe(code: int) -> str:
    """An exit code in words."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _preflight(settings: Settings, data: str | Path, out: Path, init: str, nproc: int) -> None:
    """Refuse what can be refused before anything is written, and look through the data once for all experiments."""
    from bertrain.data.formats.source import open_data
    from bertrain.training.pretrain import preflight

    if settings.mlperf.probe_accuracy and not init:
        raise UserError(
            f"mlperf.probe_accuracy {settings.mlperf.probe_accuracy} is asked of the weights to begin with, and there "
            "is no --init; name them, or set --mlperf.probe_accuracy 0"
        )
    preflight(settings, data, attempt_folder(out, 0, 0) / "run", init=init, world=nproc)
    for folder in (data, settings.evaluate.data):
        open_data(folder, vocab=settings.data.vocab, verify="hash")


def _freeze(settings: Settings, out: Path, data: str | Path, init: str) -> None:
    """Write what is run into `out`, or refuse it if something else was run there."""
    recipe, text = out / RECIPE, recipe_of(settings, data, init)
    if recipe.is_file():
        begun = recipe.read_text(encoding="utf-8").partition("\n")[0]
        if begun != text.partition("\n")[0] or resolve(str(recipe)) != settings:
            raise UserError(
                f"{out} holds experiments of other settings, data or weights ({recipe}); take another --out"
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and holds something else than experiments; take another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(recipe, text)
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror or error}") from None


def recipe_of(settings: Settings, data: str | Path, init: str) -> str:
    """Settings as a recipe, whose first line says of what; paths are written as JSON, lest one of them end the line."""
    places = [json.dumps(str(Path(data).resolve())), json.dumps(init) if init else "fresh weights"]
    return f"# MLPerf experiments on {places[0]}, beginning with {places[1]}\n\n{to_toml(settings)}"


def _start(nproc: int, arguments: list[str]) -> int:
    from bertrain.launch.local import run_in_subprocess, run_ranks

    return run_ranks(nproc, arguments) if nproc > 1 else run_in_subprocess(arguments)


def _end_as(code: int, what: str, *, may_be_repeated: bool = False) -> None:
    """End as a part has ended: in a sentence that it has said, or to go on another day. Nothing if it did well."""
    if code == EXIT_USER_ERROR:
        raise ReportedElsewhereError(f"{what} has ended, and said why")
    if code == EXIT_REQUEUE:
        raise RequeueError(f"{what} was stopped by a signal; start the same command again and it goes on from there")
    if code and not may_be_repeated:
        raise UserError(f"{what} ended by {describe(code)}; what it said stands above")
