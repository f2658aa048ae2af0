"""The command `bertrain plan`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from bertrain.base.errors import UserError
from bertrain.cli import options
from bertrain.config import resolve as config

if TYPE_CHECKING:
    from bertrain.config.settings import Settings
    from bertrain.data.formats.masking import Ints
    from bertrain.planning.devices import Gpu
    from bertrain.planning.plan import Plan
    from bertrain.planning.step_time import Jitter

app = options.new_app()
MOST_GPUS = 8192  # that --within and --spend try
MOST_MONEY = 1e12  # which infinity exceeds
VOCABULARY = 30522  # BERT's, where no data says otherwise


@app.command("plan", context_settings=options.OVERRIDES)
@options.takes_settings(options.TRAINING_OPTIONS)
def plan(
    recipe: options.RecipeName,
    gpu: Annotated[str, Option(help="the GPU, such as a100, h100, h200, b200")],
    overrides: options.Overrides,
    count: Annotated[str, Option(help="numbers of GPUs, such as 8,64,512; default: 8")] = "",
    data: Annotated[Path | None, Option(help="a data folder, for the lengths of its examples")] = None,
    lengths: Annotated[
        Path | None,
        Option(help="a .csv of lengths (columns length, sequences) instead of --data; mlperf: those of MLPerf's data"),
    ] = None,
    per_node: Annotated[int, Option(min=1, help="GPUs per machine")] = 8,
    network: Annotated[
        str,
        Option(
            help="links inside and between machines, such as nvlink+4xib-hdr (4 adapters; one for each GPU where no "
            "number is given), or a .toml; default: the GPU's own (nvlink or pcie) and ib-ndr"
        ),
    ] = "",
    calibrate: Annotated[
        Path | None,
        Option(help="a folder of `bertrain profile` on this GPU, for its speed and the variation of its steps"),
    ] = None,
    target: Annotated[float, Option(min=0, help="masked-word accuracy to reach, by MLPerf's convergence points")] = 0,
    jitter: Annotated[
        float | None, Option(min=0, max=100, help="variation of step time between ranks, in percent; default: 1")
    ] = None,
    price: Annotated[float, Option(min=0, max=MOST_MONEY, help="EUR per GPU and hour")] = 0,
    within: Annotated[
        str, Option(metavar="TIME", help="find the fewest GPUs that finish within this time, such as 10m")
    ] = "",
    spend: Annotated[
        float, Option(min=0, max=MOST_MONEY, help="find the number of GPUs that is fastest for at most this many EUR")
    ] = 0,
    tune: Annotated[bool, Option("--tune", help="also find the best token budget and policy for each count")] = False,
    plot: Annotated[Path | None, Option(help="draw the plan to this .svg, .png or .pdf")] = None,
    settings_file: options.SettingsFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Predict step time, time to train, GPU-hours and cost on GPUs that you need not have.

    Any setting can be given as --section.field VALUE. docs/how-to-plan.md shows how accurate it has been.

    Example: bertrain plan mlperf-nvidia-1x8x48-packed --gpu h200 --count 8,64 --target 0.72
    """
    from bertrain.base.units import parse_duration
    from bertrain.planning import plan as planning
    from bertrain.planning.devices import find_gpu, find_network
    from bertrain.planning.step_time import Cluster

    if sum(map(bool, (count, within, spend))) > 1:
        raise UserError(
            "conflicting-options", "--count, --within and --spend ask different questions; give one of them"
        )
    chosen = find_gpu(gpu)
    resolved = config.resolve(recipe, overrides, settings_file)
    settings, sample, notes = _fit(resolved, chosen, data, lengths, for_target=target > 0)
    variation: Jitter = (1 if jitter is None else jitter) / 100
    if calibrate is not None:
        if jitter is not None:
            raise UserError("conflicting-options", "--calibrate has the variation of its steps; leave --jitter out")
        chosen, variation, note = _calibrate(chosen, calibrate, sample)
        notes.append(note)
    cluster = Cluster(chosen, find_network(network, chosen, per_node), 1, per_node)
    wish = planning.Wish(settings, sample, cluster, target, variation, price)
    if within:
        plans = [planning.fewest_gpus(wish, parse_duration(within, "--within"), MOST_GPUS)]
    elif spend:
        plans = [planning.fastest_for(wish, spend, MOST_GPUS)]
    else:
        plans = [planning.make_plan(wish, number) for number in _counts(count or "8")]
    is_best = bool(within or spend)  # both try every token budget
    best = [planning.best_batching(wish, one.count) for one in plans] if tune and not is_best else []
    if not tune and (idle := planning.leave_idle(plans)):
        notes.append(idle)
    if plot is not None:
        from bertrain.reports.plan_plot import draw_plans

        draw_plans(plans, chosen.name, plot)
    place = {"gpu": chosen.name, "network": cluster.network.name, "per_node": per_node}
    facts = place | {"notes": notes, "plans": [one.facts() for one in plans], "tuned": [one.facts() for one in best]}
    if options.printed_json(facts, as_json):
        return
    for note in notes:
        print(note)
    print(
        f"a prediction for {chosen.name}, {per_node} to a machine, over {cluster.network.name}; ms of a step by part:"
    )
    print(planning.table_text(plans))
    if is_best:
        print(f"{plans[0].count:,} GPUs, with {_batching(plans[0], settings)}")
    for own, other in zip(plans, best, strict=False):
        gain = f"{other.sequences_per_s / own.sequences_per_s - 1:+.1%} sequences/s"
        print(f"{own.count:,} GPUs: {_batching(other, settings)} is the fastest, {gain}, {other.idle:.1%} idle")
    if plot is not None:
        print(plot)


def _batching(plan: Plan, recipe: Settings) -> str:
    """The options with which a recipe is trained as planned: token budget, policy, and what else differs from it."""
    from bertrain.planning.plan import TUNED

    values = {name: getattr(plan.batch, name) for name in TUNED}
    shown = {
        name: value
        for name, value in values.items()
        if name in ("token_budget", "policy") or value != getattr(recipe.batch, name)
    }
    return " ".join(f"--batch.{name} {shlex.quote(str(value))}" for name, value in shown.items())


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and 0 < int(word[:9]) <= 10**6 and len(word) < 8 for word in words):
        numbers = "numbers of GPUs from 1 to 1,000,000"
        raise UserError("bad-count", f"--count {text!r} is not a list of {numbers}, such as 8,64,512")
    return sorted({int(word) for word in words})


def _fit(
    settings: Settings, gpu: Gpu, data: Path | None, lengths: Path | None, *, for_target: bool
) -> tuple[Settings, Ints, list[str]]:
    """Settings without anything open, the lengths of examples, and notes about both.

    Convergence points are of training on MLPerf's data, so a target without other lengths is planned with those.
    """
    import numpy as np

    from bertrain.planning.kernel_limits import why_unfit
    from bertrain.planning.plan import MLPERF_LENGTHS, covers_engine, lengths_of

    if data is not None and lengths is not None:
        raise UserError("conflicting-options", "--data and --lengths both give lengths; leave one of them out")
    if settings.task.name:
        raise UserError("not-pretraining", "`plan` is for pre-training only; name a recipe of `bertrain pretrain`")
    if settings.train.epochs and data is None:
        raise UserError(
            "epochs-need-data", "the steps of train.epochs follow from the data; give --data, or --max-steps instead"
        )
    notes = []
    if settings.train.precision == "auto":
        settings = replace(
            settings, train=replace(settings.train, precision="bf16" if "bf16" in gpu.products else "fp32")
        )
        notes.append(f"train.precision auto: {settings.train.precision}")
    gpu.rate(settings.train.precision)
    if settings.train.precision == "fp8" and (reason := why_unfit(settings)):
        why = f"train.precision fp8 is not possible here ({reason})"
        raise UserError("precision-not-possible", f"{why}; use --train.precision bf16")
    if not covers_engine(settings):
        asked = f"--train.kernels {settings.train.kernels} in {settings.train.precision}"
        raise UserError("engine-not-possible", f"`plan` knows no step times of {asked}; use --train.kernels auto")
    if for_target and (data or lengths) and lengths != Path("mlperf"):
        notes.append("the target's convergence points are of MLPerf's data; other data may need more or fewer samples")
    if data is not None:
        from bertrain.data.formats.source import open_data
        from bertrain.training.resolve_auto import fit_to_data

        source = open_data(data, verify="size", quiet=True)
        settings, more = fit_to_data(settings, source)
        return settings, source.lengths.astype(np.int64), notes + more
    model, sizes = settings.model, settings.data
    longest = sizes.max_seq_length or model.max_positions
    sizes = replace(sizes, max_seq_length=longest)
    sizes = replace(sizes, max_predictions=sizes.max_predictions or sizes.usual_predictions())
    settings = replace(settings, model=replace(model, vocab_size=model.vocab_size or VOCABULARY), data=sizes)
    if lengths is None and for_target:
        notes.append("no --data and no --lengths: those of MLPerf's data, as the target's convergence points")
        lengths = MLPERF_LENGTHS
    if lengths is not None:
        table = MLPERF_LENGTHS if lengths == Path("mlperf") else lengths
        return settings, lengths_of(table, longest), notes
    notes.append(f"no --data and no --lengths: every example has {longest} tokens")
    return settings, np.full(4096, longest), notes


def _calibrate(gpu: Gpu, folder: Path, sample: Ints) -> tuple[Gpu, tuple[float, ...], str]:
    """The GPU at the speed of a profile, its steps as multiples of the median, and a note about both."""
    import numpy as np

    from bertrain.config.resolve import from_dict
    from bertrain.planning.devices import find_network, gpu_like, with_ceilings
    from bertrain.planning.plan import full_bins
    from bertrain.planning.step_time import Cluster, Design, calibrated
    from bertrain.profiling.sets import find_sets

    sets = find_sets([folder])
    facts, steps = sets[0].facts, np.concatenate([one.compared for one in sets])
    if "ceilings" not in facts or "settings" not in facts:
        raise UserError("not-a-profile", f"{folder} has no measured speed; measure one with `bertrain profile run`")
    device = facts["environment"]["device"]
    if (like := gpu_like(device)) is None or like.name != gpu.name:
        raise UserError(
            "conflicting-options", f"--calibrate {folder} is a profile of {device}, not of --gpu {gpu.name}; change one"
        )
    if any(one.facts.get("settings") != facts["settings"] for one in sets):
        raise UserError("different-profiles", f"{folder} has profiles of several settings; give the folder of one")
    settings = from_dict(facts["settings"])
    ceilings, tokens = facts["ceilings"], float(np.median(sets[0].tokens)) / facts["environment"]["ranks"]
    gpu = with_ceilings(gpu, settings.train.precision, ceilings["operations_per_s"], ceilings["bytes_per_s"])
    longest = np.full(1, settings.data.max_seq_length)
    lengths = longest if str(facts.get("data", "")).startswith("synthetic") else sample
    load = full_bins(settings, tokens, max(1.0, round(tokens / settings.batch.token_budget)), lengths)
    cluster = Cluster(gpu, find_network("nvlink", gpu, 1), 1, 1)
    median = float(np.median(steps))
    found = calibrated(settings, [load], cluster, Design.of(settings), median, jitter=0)
    spread = float(np.std(steps) / median)
    note = f"calibrated on {folder}: {1e3 * median:.2f} ms a step, {found.slowdown:.2f} times the table's time"
    return found, tuple((steps / median).tolist()), f"{note}; steps vary by {spread:.1%}"
