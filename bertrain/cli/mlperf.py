"""The commands of `bertrain mlperf`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from bertrain.base.errors import AgreedError, UserError
from bertrain.base.files import absolute
from bertrain.base.formatting import counted
from bertrain.base.machine import is_first_rank, under_launcher
from bertrain.cli import options
from bertrain.config import resolve as config

if TYPE_CHECKING:
    from bertrain.mlperf.check import SubmissionCheck
    from bertrain.mlperf.published import Comparison
    from bertrain.mlperf.show import LogSummary

app = options.new_app("mlperf", "MLPerf: experiments that train to a target, their logs, and the official checks.")


@app.command("run", context_settings=options.OVERRIDES)
@options.takes_settings(options.TRAINING_OPTIONS)
def mlperf_run(
    recipe: options.RecipeName,
    data: Annotated[Path, Option("--data", help="the data to train on; evaluate.data is the data to evaluate on")],
    out: Annotated[Path, Option("--out", help="the folder for result_0.txt ..., to create or continue")],
    overrides: options.Overrides,
    nexp: Annotated[int, Option(min=1, help="experiments; MLPerf requires 10")] = 10,
    init: options.InitialWeights = None,
    settings_file: options.SettingsFile = None,
    nproc: options.RankCount = 1,
    attempts: Annotated[int, Option(min=1, help="attempts at an experiment that crashes")] = 3,
    only: Annotated[
        str | None, Option(help="run only this experiment (its number, or probe), in the current processes")
    ] = None,
    attempt: Annotated[int, Option(min=0, help="with --only: the number of this attempt; 0: the next")] = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="print the resolved experiments and stop")] = False,
) -> None:
    """Train to the target several times, each with a new seed; write MLPerf's logs and check them.

    Any setting can be given as --section.field VALUE; evaluate.data is required. The target is 0.720 and evaluations
    follow MLPerf's rule, unless you set them otherwise. Existing results are kept; an experiment that crashes does not
    count and is repeated. The exit code is 1 if no experiment reached the target.

    Example: bertrain mlperf run mlperf-nvidia-1x8x48-packed --data data/ --evaluate.data eval/ --init mlperf/ --nproc 8
    --out results/
    """
    settings = replace(config.resolve(recipe, overrides, settings_file), given=None)  # --init must fit the recipe
    options.prepare_process(settings.train)
    beginning = absolute(str(init or ""))
    from bertrain.mlperf.experiment import probe_initial_weights
    from bertrain.mlperf.run import check_experiments, run_experiments, run_one

    if attempt and only is None:
        raise UserError("option-without-effect", "--attempt needs --only; give both, or leave --attempt out")
    if only is not None and (dry_run or options.is_launched()):
        other = "--dry-run" if dry_run else "`launch`, which runs all experiments"
        raise UserError("conflicting-options", f"--only runs one experiment in the ranks of torchrun, without {other}")
    if only is None and under_launcher():
        raise AgreedError(
            "missing-option", "under torchrun, ranks run one experiment at a time; choose it with --only N"
        )
    if only is None and (dry_run or options.is_launched()):
        world, here = options.world(nproc), not options.is_launched()
        experiments = check_experiments(settings, data, out, init=beginning, world=world, here=here)
        if dry_run:
            from bertrain.training.announce import dry_run as describe

            what = describe(experiments, data, world=world)
            print(f"{counted(nexp, 'experiment')} into {out}, each of them:\n{what}")
            return
        parts = [*(["probe"] if settings.mlperf.probe_accuracy else []), *map(str, range(nexp))]
        options.start_ranks(
            nproc, attempts - 1, [out] * len(parts), settings=experiments, data=[data, settings.evaluate.data],
            tasks=[["--only", part] for part in parts],
        )  # fmt: skip
    if only is None:
        checked = run_experiments(settings, data, out, nexp=nexp, init=beginning, nproc=nproc, attempts=attempts)
        _print_verdict(checked, as_json=False)
        if not checked.score.converged:
            print(f"no experiment reached the target (0 of {checked.score.results}): exit code 1")
            raise typer.Exit(1)
    elif only == "probe":
        accuracy = probe_initial_weights(settings, beginning)
        if is_first_rank():
            print(f"the probe: the initial weights predict {accuracy:.5f} of the masked words correctly, as expected")
    elif only.isascii() and only.isdigit():
        checked_all = run_one(settings, data, out, number=int(only), attempt=attempt, nexp=nexp, init=beginning)
        if checked_all is not None:
            _print_verdict(checked_all, as_json=False)
    else:
        raise UserError("invalid-value", f"--only is {only!r}; give the number of an experiment, or probe")


@app.command("check")
def mlperf_check(
    folder: Annotated[Path, Argument(metavar="DIR", help="a folder of result_*.txt")],
    ruleset: Annotated[list[str] | None, Option(help="1.1.0 to 5.0.0; default: by the date of the logs")] = None,
    division: Annotated[
        Literal["closed", "open"] | None, Option(help="division to check for; default: that of the logs")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check results with MLPerf's own checkers; exit code 0 if they pass, 1 if not.

    It checks compliance, the rule about seeds and, in the closed division, the reference's convergence points.

    Example: bertrain mlperf check results/
    """
    from bertrain.mlperf.check import check_results

    checked = check_results(folder, rulesets=ruleset or (), division=division)
    _print_verdict(checked, as_json=as_json)
    raise typer.Exit(0 if checked.passes else 1)


def _print_verdict(checked: SubmissionCheck, *, as_json: bool) -> None:
    if options.printed_json(checked, as_json):
        return
    for one in checked.compliance:
        print(f"{Path(one.file).name}  rules {one.ruleset}: {'complies' if one.passes else 'does not comply'}")
        for complaint in one.complaints:
            print(f"  {complaint}")
    print(f"seeds: {'one for each run, all different' if checked.seeds_pass else 'refused'}")
    for complaint in checked.seed_complaints:
        print(f"  {complaint}")
    for ruleset, point in checked.convergence.items():
        against = "" if point.reference is None else f", the reference's {point.reference:,.0f}"
        mean = "" if point.samples is None else f" {point.samples:,.0f} samples{against};"
        scaling = f"; scores are multiplied by {point.scaling:.4f}" if point.passes and point.scaling > 1 else ""
        verdict = "accepted" if point.passes else "refused"
        print(f"convergence, rules {ruleset}:{mean} {verdict} ({point.words}){scaling}")
    score = checked.score
    if checked.scaled_minutes is None:
        print(f"score: none, {score.converged} of {score.results} converged")
    else:
        scaled = "" if checked.scaled_minutes == score.minutes else f", {checked.scaled_minutes:.4f} once scaled"
        print(f"score: {score.minutes:.4f} minutes{scaled}; {score.converged} of {score.results} converged")
    if checked.passes:
        print(f"verdict: all checks passed, {checked.division} division (data, model and tuning are not checked)")
    else:
        print(f"verdict: checks failed, {checked.division} division:")
        for sentence in checked.verdict:
            print(f"  - {sentence}")


@app.command("show")
def mlperf_show(
    files: Annotated[list[Path], Argument(metavar="FILE|RECIPE...", help="MLPerf logs of any submitter, or recipes")],
    plot: Annotated[Path | None, Option(help="plot their accuracies into this .svg file")] = None,
    ranks: Annotated[int, Option(min=0, help="accelerators; 0: as many as the log has")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Print time to train, samples to converge, accuracies and sequences per second of MLPerf logs of BERT.

    For each log or recipe, it adds the fastest published results with this batch size and number of accelerators, the
    speed of bertrain on one such GPU, and a prediction by `bertrain plan`. With --json, it prints a line for each log
    and recipe, and a line with the score if the logs are several runs of one system.

    Example: bertrain mlperf show results/result_0.txt --plot accuracy.svg
    """
    from bertrain.config.recipe import recipe_names
    from bertrain.mlperf.published import compare_batch, compare_recipe
    from bertrain.mlperf.show import MIN_SCORED, find_mixture, plot_logs, score_runs, show_logs

    recipes = {
        str(file): compare_recipe(str(file)) for file in files if str(file) in recipe_names() and not file.exists()
    }
    files = [file for file in files if str(file) not in recipes]
    logs = show_logs(files, ranks=ranks)
    published = {log.file: compare_batch(log.global_batch_size, log.ranks) for log in logs}
    is_one_system = not find_mixture(logs)
    score = score_runs(logs) if len(logs) >= MIN_SCORED and is_one_system else None
    if plot is not None:
        if not files:
            raise UserError("conflicting-options", "--plot draws MLPerf logs; name at least one, or leave --plot out")
        plot_logs(files, plot)
    if as_json:
        records = [asdict(log) | {"published": published[log.file]} for log in logs]
        named = [{"recipe": name, "published": found} for name, found in recipes.items()]
        for record in (*records, *named, *([{"score": score}] if score is not None else [])):
            options.printed_json(record, as_json)
        return
    for log in logs:
        _describe(log, whole=len(logs) == 1)
        if not is_one_system:
            _compare(log, published[log.file])
    if score is not None:
        minutes = f"{score.minutes:.4f} minutes" if score.minutes is not None else f"none: {score.reason}"
        print(f"score of these {score.results}, the fastest and the slowest left out: {minutes}")
    if logs and is_one_system:
        _compare(logs[0], published[logs[0].file])
    for name, found in recipes.items():
        print("\n".join([name, *(line for one in found for line in one.lines())]))
    if plot is not None:
        print(plot)


def _compare(log: LogSummary, published: Sequence[Comparison]) -> None:
    batch, ranks = (number or "unknown" for number in (log.global_batch_size, log.ranks))
    none = f"published: nothing in our table; batch {batch}, accelerators {ranks}"
    print("\n".join(line for one in published for line in one.lines()) or none)


def _describe(log: LogSummary, *, whole: bool) -> None:
    """One log: a paragraph, and its accuracies where it is the only one."""

    def shown(value: float | None, form: str) -> str:
        return "unknown" if value is None else format(value, form)

    who = ", ".join(text for text in (log.organization, log.platform, log.division) if text) or "unknown"
    print(f"{log.file}: {who}; {log.status}")
    print(
        f"  {shown(log.train_samples, ',')} samples in {shown(log.time_to_train_s, ',.2f')} s to an accuracy of "
        f"{shown(log.final_accuracy, '.5f')}; batch {shown(log.global_batch_size, ',')}, seed {log.seed}"
    )
    speeds = [f"{shown(log.sequences_per_s, ',.1f')} sequences/s"]
    if log.ranks:
        speeds.append(f"{shown(log.sequences_per_s_per_rank, ',.1f')} for each of {log.ranks} ranks")
    if log.sequences_per_s_between_evaluations is not None:
        pause = shown(log.mean_evaluation_s, ".2f")
        speeds.append(f"{log.sequences_per_s_between_evaluations:,.1f} between evaluations of {pause} s")
    print(f"  {', '.join(speeds)}")
    for doubt in log.doubts:
        print(f"  note: {doubt}")
    if log.unreadable_lines:
        print(f"  lines that are truncated or not JSON: {log.unreadable_lines}")
    if whole:
        print(f"  {'samples':>12} {'seconds':>10} {'accuracy':>9} {'sequences/s':>12}")
        for one in log.evaluations:
            speed = shown(one.sequences_per_s, ",.1f")
            print(f"  {shown(one.samples, ','):>12} {one.seconds:>10,.1f} {one.accuracy:>9.5f} {speed:>12}")
