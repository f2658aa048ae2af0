"""One MLPerf experiment: ordinary pre-training whose events are written as an MLPerf log.

    experiments/3-1/result.txt   the log of experiment 3, attempt 1, while it runs
    experiments/3-1/run/         its run folder
    result_3.txt                 the complete log

Only rank 0 writes. An experiment that ends before run_stop leaves no result, so every result is complete.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertrain.base.console import warn
from bertrain.base.errors import AgreedError, DivergedError, UserError
from bertrain.base.extras import import_extra
from bertrain.base.files import write_atomically, writing
from bertrain.base.machine import is_first_rank
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.mlperf.log import ResultLog
from bertrain.optim.schedules import in_steps
from bertrain.planning.convergence import TARGET
from bertrain.ranks.parallel import Ranks, count_ranks
from bertrain.run.checkpoint import Progress
from bertrain.training.events import Events
from bertrain.training.state import TrainState

SUCCESS, ABORTED = "success", "aborted"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def check_settings(settings: Settings) -> None:
    if not settings.evaluate.data:
        raise UserError(
            "missing-evaluation-data", "the target accuracy is measured on held-out data; give --evaluate.data DIR"
        )
    if not settings.nominal_sequences:
        raise UserError(
            "missing-batch-size",
            "MLPerf's log needs the global batch size; set batch.sequences or mlperf.global_batch_size",
        )
    for name in ("budget", "fits", "skip_steps"):
        if getattr(settings.train, name):
            raise UserError("setting-not-for-mlperf", f"an MLPerf experiment cannot use train.{name}; leave it out")
    optimizer, decay = settings.optimizer.name, settings.schedule.decay
    if settings.mlperf.division == "closed" and (optimizer != "lamb" or decay in ("cosine", "constant")):
        rule = "the closed division requires LAMB and polynomial decay"
        broken = f"but optimizer.name is {optimizer} and schedule.decay {decay}"
        raise UserError("not-closed-division", f"{rule}, {broken}; set --mlperf.division open")


def warn_of_settings(settings: Settings) -> None:
    """Warn of settings that pass the checkers but break the rules of the closed division."""
    evaluate = settings.evaluate
    if settings.mlperf.division == "open":
        return
    if evaluate.target_accuracy < TARGET:
        warn(f"the closed division's target is {TARGET}; evaluate.target_accuracy is lower")
    if evaluate.rule != "mlperf":
        warn("the closed division requires evaluate.rule mlperf; these results cannot be submitted there")


def as_experiment(settings: Settings) -> Settings:
    """The settings of an experiment: a new random seed, and no data verification before the clock starts.

    The target and the evaluation interval default to MLPerf's.
    """
    evaluate = replace(settings.evaluate, target_accuracy=settings.evaluate.target_accuracy or TARGET)
    if not evaluate.every_samples:
        evaluate = replace(evaluate, rule="mlperf")
    train, data = replace(settings.train, seed=-1), replace(settings.data, verify="size")
    return replace(settings, train=train, data=data, evaluate=evaluate).check()


def attempt_folder(out: str | Path, number: int, attempt: int) -> Path:
    return Path(out) / "experiments" / f"{number}-{attempt}"


def run_experiment(
    settings: Settings, data: str | Path, out: str | Path, *, number: int = 0, attempt: int = 1, init: str = ""
) -> bool:
    """Run experiment `number` in this process (or in all of these ranks); returns whether it converged.

    The log becomes `result_NUMBER.txt` in `out` when the run ends, converged or not, unless a signal stopped it.
    """
    from bertrain.training.start import pretrain

    import_extra("mlperf_logging")
    check_settings(settings)
    result, folder = Path(out) / f"result_{number}.txt", attempt_folder(out, number, attempt)
    log: ResultLog | None = None
    if is_first_rank():
        _refuse_existing(result)
        _refuse_existing(folder)
    cleared, reason = clear_page_cache(settings)
    if is_first_rank():
        with writing(folder):
            folder.mkdir(parents=True)
        log = ResultLog(folder / "result.txt")
        log.event("cache_clear", cleared, **({"reason": reason} if reason else {}))
        log.start("init_start", ranks=count_ranks())
    events = EventLogger(log)
    try:
        pretrain(as_experiment(settings), data, folder / "run", init=init, events=events)
    except DivergedError as error:
        events.diverged()
        if log is not None:
            print(f"experiment {number} diverged: {error}", flush=True)
    if log is not None:
        log.close()
        _refuse_existing(result)  # another attempt may have written it meanwhile
        write_atomically(result, log.path.read_text(encoding="utf-8"))
    return events.status == SUCCESS


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise UserError("result-exists", f"{path} exists; choose another --only, --attempt or --out")


def clear_page_cache(settings: Settings) -> tuple[bool, str]:
    """Drop the page cache, on one rank of each machine; returns whether it was done, and if not, why."""
    if not settings.mlperf.clear_cache:
        return False, "mlperf.clear_cache is false"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return False, "the first rank of the machine does it"
    try:
        os.sync()
        DROP_CACHES.write_text("3\n")
    except OSError as error:
        return False, f"not permitted: {error.strerror or error}"
    return True, ""


class EventLogger(Events):
    """Logs the events of a run with MLPerf's keys, in MLPerf's order; all ranks but the first have no log."""

    def __init__(self, log: ResultLog | None) -> None:
        self._log = log
        self._last_evaluation = (0, 0.0)  # samples and clock at the end of the last evaluation
        self._eval_samples = 0
        self._started = 0.0
        self._accuracy = 0.0
        self._target = 1.0
        self.status = ABORTED

    def building(self, settings: Settings, state: TrainState, loader: Loader) -> None:
        self._state, self._target = state, settings.evaluate.target_accuracy
        if self._log is None:
            return
        submitted, seed = submission(settings, state.ranks), ("seed", settings.train.seed)
        for key, value in [*submitted, seed, *sizes(settings, loader, state.ranks.world)]:
            self._log.event(key, value)
        for name in tensor_names(settings):
            self._log.event("weights_initialization", None, tensor=name)
        for key, value in hyperparameters(settings):
            self._log.event(key, value)

    def starting(self) -> None:
        ranks = self._state.ranks
        if ranks.device.type == "cuda":
            import torch

            torch.cuda.synchronize(ranks.device)
        ranks.broadcast_int(0)  # a barrier
        self._started = time.monotonic()
        self._last_evaluation = (0, self._started)
        if self._log is not None:
            self._log.end("init_stop")
            self._log.start("run_start")
            self._log.start("epoch_start", epoch_num=0)
            self._log.start("block_start", first_epoch_num=1, epoch_count=1)

    def evaluating(self, samples: int) -> None:
        before, since = self._last_evaluation
        if self._log is not None:
            rate = (samples - before) / max(time.monotonic() - since, 1e-9)
            self._log.event("tracked_stats", {"throughput": rate}, epoch_num=samples)
            self._log.start("eval_start", samples, epoch_num=samples)

    def evaluated(self, samples: int, result: dict[str, float]) -> None:
        self._accuracy, self._eval_samples = result["mlm_accuracy"], int(result["examples"])
        self._last_evaluation = (samples, time.monotonic())
        if self._log is not None:
            self._log.end("eval_stop", samples, epoch_num=samples)
            self._log.event("eval_accuracy", self._accuracy, epoch_num=samples)

    def ended(self, progress: Progress, reason: str) -> None:
        samples, self.status = progress.samples, SUCCESS if self._accuracy >= self._target else ABORTED
        if self._log is None:
            return
        self._log.end("block_stop", first_epoch_num=1)
        self._log.end("epoch_stop", epoch_num=samples)
        self._log.event("train_samples", samples)
        self._log.event("eval_samples", self._eval_samples)
        self._log.end("run_stop", status=self.status, reason=reason)
        seconds = time.monotonic() - self._started
        self._log.event("tracked_stats", {"throughput": samples / max(seconds, 1e-9), "epoch_num": samples})

    def diverged(self) -> None:
        """Log the end of a run whose loss was not finite; it counts as not converged."""
        self._accuracy = -1.0
        self.ended(self._state.progress, "diverged")


def submission(settings: Settings, ranks: Ranks) -> list[tuple[str, Any]]:
    from bertrain.run.folder import describe_environment

    mlperf = settings.mlperf
    device = describe_environment(ranks.world, str(ranks.device), 0)["device"]
    return [
        ("submission_benchmark", "bert"),
        ("submission_org", mlperf.organization),
        ("submission_division", mlperf.division),
        ("submission_status", mlperf.status),
        ("submission_platform", mlperf.platform or f"{ranks.world}x{device}"),
    ]


def sizes(settings: Settings, loader: Loader, world: int) -> list[tuple[str, Any]]:
    """The nominal batch size and the length of the schedule."""
    batch, schedule = settings.nominal_sequences, in_steps(settings.schedule, settings.train.max_steps)
    ahead = loader.balances(loader.sizes_ahead(0), settings.batch.token_budget)
    return [
        ("global_batch_size", batch),
        ("d_batch_size", -(-batch // world)),
        ("gradient_accumulation_steps", max(-(-step.num_bins // world) for step in ahead)),
        ("max_predictions_per_seq", settings.data.max_predictions),
        ("opt_learning_rate_training_steps", schedule.decay_steps or settings.train.max_steps),
        ("num_warmup_steps", schedule.warmup_steps),
    ]


def hyperparameters(settings: Settings) -> list[tuple[str, Any]]:
    """The optimizer and its schedule; the closed division knows LAMB's keys only."""
    optimizer, schedule = settings.optimizer, in_steps(settings.schedule, settings.train.max_steps)
    prefix = f"opt_{optimizer.name}"
    power = 0.5 if schedule.decay == "square-root" else schedule.power
    return [
        ("opt_base_learning_rate", optimizer.learning_rate),
        ("opt_name", optimizer.name),
        (f"{prefix}_epsilon", optimizer.epsilon),
        ("opt_epsilon", optimizer.epsilon),
        (f"{prefix}_beta_1", optimizer.beta1),
        (f"{prefix}_beta_2", optimizer.beta2),
        (f"{prefix}_weight_decay{'_rate' if optimizer.name == 'lamb' else ''}", optimizer.weight_decay),
        ("opt_gradient_clip_norm", optimizer.clip_norm),
        ("opt_learning_rate_warmup_steps", schedule.warmup_steps),
        ("opt_lamb_learning_rate_decay_poly_power", power),
        ("start_warmup_step", schedule.start_warmup_step),
    ]


def tensor_names(settings: Settings) -> list[str]:
    """The tensors of the model by their TensorFlow names, as in every published log of BERT."""
    from bertrain.weights.names import TENSORFLOW
    from bertrain.weights.tensors import name_parameters

    return list(name_parameters(TENSORFLOW, settings.model))


def probe_initial_weights(settings: Settings, init: str) -> float:
    """The masked-word accuracy of the initial weights, which shows whether they and the data are MLPerf's.

    Raises UserError if it differs from mlperf.probe_accuracy by more than mlperf.probe_tolerance.
    """
    from bertrain.model.families import new_model
    from bertrain.ranks import parallel
    from bertrain.training.engine import predictor
    from bertrain.training.evaluate import HeldOutEvaluator
    from bertrain.training.precision import set_precision
    from bertrain.training.resolve_auto import resolve_auto
    from bertrain.training.resolved_run import open_for
    from bertrain.weights.source import copy_weights, read_weights

    check_settings(settings)
    settings, _ = resolve_auto(settings)
    expected, tolerance = settings.mlperf.probe_accuracy, settings.mlperf.probe_tolerance
    if not expected or not init:
        raise AgreedError("missing-init", "the probe needs both --init and mlperf.probe_accuracy")
    set_precision(settings.train)
    with parallel.join(settings.train) as ranks:
        model = new_model(settings.model)
        parameters = {name: tensor.data for name, tensor in model.named_parameters()}
        extends = settings.train.init_positions == "extend"
        missing = copy_weights(parameters, read_weights(init), extends_positions=extends)
        if missing:
            raise AgreedError("incomplete-weights", f"{init} has no {', '.join(missing)}; use weights with both heads")
        data = open_for(settings.evaluate.data, settings, ranks)
        held_out = HeldOutEvaluator(data, settings, ranks, settings.evaluate.max_examples)
        predict = predictor(model.to(ranks.device), settings, ranks.device)
        accuracy = held_out.evaluate(predict, ranks)["mlm_accuracy"]
        if abs(accuracy - expected) > tolerance:
            found = f"the accuracy of {init} on {settings.evaluate.data} is {accuracy:.5f}"
            wanted = f"mlperf.probe_accuracy is {expected:.5f} (tolerance {tolerance:g})"
            cure = "check both, or set --mlperf.probe_accuracy 0"
            raise AgreedError("wrong-initial-accuracy", f"{found}, but {wanted}; {cure}")
        return accuracy
