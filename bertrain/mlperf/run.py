"""`bertrain mlperf run`: many experiments, one after another.

Each attempt runs in its own process (or `nproc` of them), so that it cannot affect the next one. OUT/recipe.toml has
the resolved settings; experiment.py lists the other files.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from bertrain.base.errors import EXIT_USER_ERROR, ReportedElsewhereError, RequeueError, StoppedError, UserError
from bertrain.base.extras import import_extra
from bertrain.base.files import absolute, write_atomically, writing
from bertrain.base.formatting import counted
from bertrain.base.machine import is_first_rank
from bertrain.config.resolve import resolve, to_toml
from bertrain.config.settings import Settings
from bertrain.data.formats.source import open_data
from bertrain.mlperf.check import SubmissionCheck, check_results
from bertrain.mlperf.experiment import (
    as_experiment,
    attempt_folder,
    check_settings,
    run_experiment,
    warn_of_settings,
)
from bertrain.mlperf.log import read_log
from bertrain.mlperf.show import summarize_log
from bertrain.ranks import parallel
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
) -> SubmissionCheck:
    """Train `nexp` times to evaluate.target_accuracy, each time with a new seed, and check the logs.

    Results that exist in `out` are kept. An attempt that crashes does not count and is repeated with a new seed, up to
    `attempts` times. A run that does not converge counts.
    """
    init, out = absolute(init), Path(out)
    settings = check_experiments(settings, data, out, init=init, world=nproc)
    for folder in (data, settings.evaluate.data):  # once for all experiments
        open_data(folder, vocab=settings.data.vocab, verify="hash")
    write_recipe(settings, out, data, init)
    evaluate = settings.evaluate
    every = evaluation_interval(evaluate, settings.nominal_sequences)
    print(f"{counted(nexp, 'experiment')} into {out}, each with a new random seed", flush=True)
    print(f"  to an accuracy of {evaluate.target_accuracy:g}, evaluated every {every:,} samples", flush=True)
    common = ["mlperf", "run", str(out / RECIPE), "--data", str(data), "--out", str(out)]
    common += ["--init", init] if init else []
    if settings.mlperf.probe_accuracy:
        _check_exit_code(_start(nproc, [*common, "--only", "probe"]), "the probe")
    for number in range(nexp):
        result = out / f"result_{number}.txt"
        if result.is_file():
            print(f"experiment {number}: {result} exists and is kept", flush=True)
            continue
        first = next_attempt(out, number)
        for attempt in range(first, first + attempts):
            print(f"experiment {number} of 0 to {nexp - 1}, attempt {attempt}", flush=True)
            code = _start(nproc, [*common, "--only", str(number), "--attempt", str(attempt)])
            if result.is_file():
                break
            _check_exit_code(code, f"experiment {number}", may_be_repeated=True)
            print(f"experiment {number}, attempt {attempt}, ended with {describe_exit(code)}: not counted", flush=True)
        else:
            folder = attempt_folder(out, number, attempt)
            crashed = f"experiment {number} crashed in all {attempts} attempts"
            raise UserError(
                "experiment-failed", f"{crashed}; see the logs in {folder}, then run the same command again"
            )
        print(f"experiment {number}: {describe_result(result)}", flush=True)
    return check_results(out)


def run_one(
    settings: Settings, data: str | Path, out: str | Path, *, number: int, attempt: int, nexp: int, init: str
) -> SubmissionCheck | None:
    """Run one experiment in these ranks, unless it has a result; `attempt` 0 is the next one.

    In a job, the first rank of the experiment that completes all `nexp` returns their check.
    """
    out = Path(out)
    if is_first_rank():
        write_recipe(as_experiment(settings), out, data, init)
    if (result := out / f"result_{number}.txt").is_file() and not attempt:
        if is_first_rank():
            print(f"experiment {number}: {result} exists and is kept", flush=True)
    else:
        if not attempt:
            with parallel.join(settings.train) as ranks:  # the ranks agree on the number
                attempt = ranks.broadcast_int(next_attempt(out, number) if ranks.is_first else 0)
        run_experiment(settings, data, out, number=number, attempt=attempt, init=init)
    if not is_first_rank() or "BERTRAIN_TASK" not in os.environ:
        return None
    print(f"experiment {number}: {describe_result(result)}", flush=True)
    is_last = all((out / f"result_{other}.txt").is_file() for other in range(nexp))
    return check_results(out) if is_last else None


def next_attempt(out: Path, number: int) -> int:
    """The number of the next attempt; refuses to start one while an earlier one is running."""
    attempt = 1
    while (folder := attempt_folder(out, number, attempt)).exists():
        if Run.exists(folder / "run"):
            with Run.open(folder / "run").lock() as is_free:
                if not is_free:
                    raise UserError("experiment-running", f"{folder} is still running; wait for it or stop it")
        attempt += 1
    return attempt


def describe_result(result: Path) -> str:
    log = read_log(result)
    one, end = summarize_log(log), log.first("run_stop")
    failed = f"did not converge ({end.metadata['reason'] if end else log.status})"
    reached = f"accuracy {one.final_accuracy or 0:.4f} after {one.train_samples or 0:,} samples"
    verdict = "converged" if one.has_converged else failed
    return f"{verdict}; {reached} in {one.time_to_train_s or 0:,.1f} s, seed {one.seed}"


def describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def check_experiments(
    settings: Settings, data: str | Path, out: Path, *, init: str, world: int, here: bool = True
) -> Settings:
    """The settings of the experiments; refuses what would fail. Nothing is written. `here` as in `preflight`."""
    from bertrain.training.start import preflight

    import_extra("mlperf_logging")
    check_settings(settings)
    settings = as_experiment(settings)
    warn_of_settings(settings)
    if settings.mlperf.probe_accuracy and not init:
        raise UserError(
            "missing-init",
            "mlperf.probe_accuracy checks the initial weights; give --init, or --mlperf.probe_accuracy 0",
        )
    preflight(settings, data, attempt_folder(out, 0, 0) / "run", init=init, world=world, here=here)
    _has_recipe(settings, out, data, init)
    return settings


def _has_recipe(settings: Settings, out: Path, data: str | Path, init: str) -> bool:
    """Whether `out` has the recipe of these experiments; refuses a folder of others."""
    recipe, text = out / RECIPE, experiment_recipe(settings, data, init)
    if recipe.is_file():
        first_line = recipe.read_text(encoding="utf-8").partition("\n")[0]
        if first_line != text.partition("\n")[0] or resolve(str(recipe)) != settings:
            raise UserError(
                "other-experiments", f"{recipe} has different settings, data or weights; choose another --out"
            )
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("folder-exists", f"{out} exists and is not a folder of experiments; choose another --out")
    return recipe.is_file()


def write_recipe(settings: Settings, out: Path, data: str | Path, init: str) -> None:
    """Write the recipe of the experiments into `out`, unless it is there; refuses a folder of other experiments."""
    if _has_recipe(settings, out, data, init):
        return
    with writing(out / RECIPE):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / RECIPE, experiment_recipe(settings, data, init))


def experiment_recipe(settings: Settings, data: str | Path, init: str) -> str:
    """The settings as a recipe; its first line names data and weights, as JSON, so that no path can break the line."""
    places = [json.dumps(str(Path(data).resolve())), json.dumps(init) if init else "fresh weights"]
    return f"# MLPerf experiments on {places[0]}, beginning with {places[1]}\n\n{to_toml(settings)}"


def _start(nproc: int, arguments: list[str]) -> int:
    from bertrain.launch.local import run_in_subprocess, run_ranks

    return run_ranks(nproc, arguments) if nproc > 1 else run_in_subprocess(arguments)


def _check_exit_code(code: int, part: str, *, may_be_repeated: bool = False) -> None:
    """Raise what the process of a part has reported, or its failure; nothing if it succeeded."""
    if code == EXIT_USER_ERROR:
        raise ReportedElsewhereError("reported-elsewhere", f"{part} has failed and printed the reason")
    if code == StoppedError.exit_code:
        raise StoppedError("experiment-stopped", f"Ctrl-C stopped {part}; run the same command again to continue")
    if code == RequeueError.exit_code:
        raise RequeueError("experiment-stopped", f"a signal stopped {part}; run the same command again to continue")
    if code and not may_be_repeated:
        raise UserError("experiment-failed", f"{part} ended with {describe_exit(code)}; see its output above")
