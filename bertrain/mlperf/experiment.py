"""One experiment: the ordinary trainer, its events written down as an MLPerf log.

    experiments/3-1/result.txt   the log of experiment 3, attempt 1, as it grows
    experiments/3-1/run/         its run folder
    result_3.txt                 the log, once it is whole

Rank 0 writes. Whatever ends an experiment before run_stop leaves no result, so a log that is there is a whole one.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertrain.base.console import warn
from bertrain.base.errors import AgreedError, DivergedError, UserError
from bertrain.base.files import write_atomically
from bertrain.base.machine import is_first_rank
from bertrain.config.settings import OptimizerSettings, Settings
from bertrain.data.feed.loader import Loader
from bertrain.mlperf.log import ResultLog, require_library
from bertrain.optim.schedules import in_steps
from bertrain.ranks.parallel import Ranks
from bertrain.run.checkpoint import Progress
from bertrain.training.events import Events
from bertrain.training.state import TrainState

SUCCESS, ABORTED = "success", "aborted"
TARGET = 0.720
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def check_settings(settings: Settings) -> None:
    """Refuse settings that no experiment can be made of."""
    if not settings.evaluate.data:
        raise UserError("an experiment trains until a target is reached on held-out data; name it: --evaluate.data DIR")
    if not settings.nominal_sequences:
        raise UserError("the log names the global batch size: set batch.sequences, or mlperf.global_batch_size")
    for name in ("budget", "skip_steps"):
        if getattr(settings.train, name):
            raise UserError(f"train.{name} has no place in an experiment; leave it out")
    if settings.mlperf.division == "closed" and settings.optimizer.name != "lamb":
        raise UserError(
            f"the closed division trains with LAMB, and optimizer.name is {settings.optimizer.name}; set "
            "--mlperf.division open"
        )
    if settings.mlperf.division == "closed" and settings.schedule.decay in ("cosine", "constant"):
        raise UserError(
            f"the closed division's learning rate falls by a power, and schedule.decay is {settings.schedule.decay}; "
            "set --mlperf.division open"
        )


def warn_of_settings(settings: Settings) -> None:
    """Say what makes results that no checker refuses and that could not be submitted as closed all the same."""
    evaluate = settings.evaluate
    if settings.mlperf.division == "open":
        return
    if evaluate.target_accuracy < TARGET:
        warn(f"the closed division's target is {TARGET}, and evaluate.target_accuracy is lower")
    if evaluate.rule != "mlperf":
        warn("the closed division evaluates by evaluate.rule mlperf; these results could not be submitted there")


def as_experiment(settings: Settings) -> Settings:
    """The settings of an experiment: a seed of its own, and data that is not read through before the clock starts.

    Where they name no target, it is MLPerf's; where they name no interval of evaluations, it is that of MLPerf's rule.
    """
    evaluate = settings.evaluate
    if not evaluate.target_accuracy:
        evaluate = replace(evaluate, target_accuracy=TARGET)
    if not evaluate.every_samples:
        evaluate = replace(evaluate, rule="mlperf")
    return replace(
        settings,
        train=replace(settings.train, seed=-1),
        data=replace(settings.data, verify="size"),
        evaluate=evaluate,
    ).check()


def attempt_folder(out: str | Path, number: int, attempt: int) -> Path:
    return Path(out) / "experiments" / f"{number}-{attempt}"


def run_experiment(
    settings: Settings, data: str | Path, out: str | Path, *, number: int = 0, attempt: int = 1, init: str = ""
) -> bool:
    """Run experiment `number` in this process (or in all of these ranks); returns whether it converged.

    Its log becomes `result_NUMBER.txt` in `out` when the run is over, converged or not, and not if it was stopped.
    """
    require_library()
    check_settings(settings)
    result, folder = Path(out) / f"result_{number}.txt", attempt_folder(out, number, attempt)
    log: ResultLog | None = None
    is_first = is_first_rank()
    for begun in (result, folder) if is_first else ():
        if begun.exists():
            raise UserError(f"{begun} is there already; take another --only, --attempt or --out")
    cleared, reason = clear_page_cache(settings)
    if is_first:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"cannot write into {out}: {error.strerror or error}") from None
        log = ResultLog(folder / "result.txt")
        log.event("cache_clear", cleared, **({"reason": reason} if reason else {}))
        log.start("init_start", ranks=int(os.environ.get("WORLD_SIZE", "1")))
    recorder = Recorder(log)
    from bertrain.training.pretrain import pretrain

    try:
        pretrain(as_experiment(settings), data, folder / "run", init=init, events=recorder)
    except DivergedError as error:
        recorder.diverged()
        if log is not None:
            print(f"experiment {number} diverged: {error}", flush=True)
    if log is not None:
        log.close()
        if result.exists():
            raise UserError(f"{result} is there already, of another attempt; this one is {log.path}")
        write_atomically(result, log.path.read_text(encoding="utf-8"))
    return recorder.status == SUCCESS


def clear_page_cache(settings: Settings) -> tuple[bool, str]:
    """Drop this machine's page cache, once for all ranks on it; returns whether it was done, or else why not."""
    if not settings.mlperf.clear_cache:
        return False, "mlperf.clear_cache is false"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return False, "left to the first rank of the machine"
    try:
        os.sync()
        DROP_CACHES.write_text("3\n")
    except OSError as error:
        return False, f"not permitted here: {error.strerror or error}"
    return True, ""


class Recorder(Events):
    """Writes down what happens, in MLPerf's keys and order. Without a log, as on all ranks but one, it only waits."""

    def __init__(self, log: ResultLog | None) -> None:
        self._log = log
        self._last_pause = (0, 0.0)  # samples and clock when training last went on
        self._eval_samples = 0
        self._started = 0.0
        self._accuracy = 0.0
        self._target = 1.0
        self.status = ABORTED

    def building(self, settings: Settings, state: TrainState, loader: Loader) -> None:
        self._state, self._target = state, settings.evaluate.target_accuracy
        if self._log is None:
            return
        for key, value in submission(settings, state.ranks):
            self._log.event(key, value)
        self._log.event("seed", settings.train.seed)
        for key, value in sizes(settings, loader, state.ranks.world):
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
        ranks.broadcast_int(0)  # no rank goes on before the first has come here
        self._started = time.monotonic()
        self._last_pause = (0, self._started)
        if self._log is not None:
            self._log.end("init_stop")
            self._log.start("run_start")
            self._log.start("epoch_start", epoch_num=0)
            self._log.start("block_start", first_epoch_num=1, epoch_count=1)

    def evaluating(self, samples: int) -> None:
        before, since = self._last_pause
        if self._log is not None:
            rate = (samples - before) / max(time.monotonic() - since, 1e-9)
            self._log.event("tracked_stats", {"throughput": rate}, epoch_num=samples)
            self._log.start("eval_start", samples, epoch_num=samples)

    def evaluated(self, samples: int, result: dict[str, float]) -> None:
        self._accuracy, self._eval_samples = result["mlm_accuracy"], int(result["examples"])
        self._last_pause = (samples, time.monotonic())
        if self._log is not None:
            self._log.end("eval_stop", samples, epoch_num=samples)
            self._log.event("eval_accuracy", self._accuracy, epoch_num=samples)

    def ended(self, progress: Progress, reason: str) -> None:
        self.status = SUCCESS if self._accuracy >= self._target else ABORTED
        self._stop(progress.samples, reason)

    def diverged(self) -> None:
        """The run ended in steps that were not finite; it counts as one that did not converge."""
        self.status = ABORTED
        self._stop(self._state.progress.samples, "diverged")

    def _stop(self, samples: int, reason: str) -> None:
        if self._log is None:
            return
        self._log.end("block_stop", first_epoch_num=1)
        self._log.end("epoch_stop", epoch_num=samples)
        self._log.event("train_samples", samples)
        self._log.event("eval_samples", self._eval_samples)
        self._log.end("run_stop", status=self.status, reason=reason)
        seconds = time.monotonic() - self._started
        self._log.event("tracked_stats", {"throughput": samples / max(seconds, 1e-9), "epoch_num": samples})


# --- what a log says of a run -----------------------------------------------------------------------------


def submission(settings: Settings, ranks: Ranks) -> list[tuple[str, Any]]:
    """Whose run this is, and on what."""
    from bertrain.run.folder import describe_environment

    about = settings.mlperf
    device = describe_environment(ranks.world, str(ranks.device), 0)["device"]
    return [
        ("submission_benchmark", "bert"),
        ("submission_org", about.organization),
        ("submission_division", about.division),
        ("submission_status", about.status),
        ("submission_platform", about.platform or f"{ranks.world}x{device}"),
    ]


def sizes(settings: Settings, loader: Loader, world: int) -> list[tuple[str, Any]]:
    """The batch, nominally, and the length of the schedule."""
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
    """The update rule and its schedule. LAMB's names are the closed division's."""
    optimizer, schedule = settings.optimizer, in_steps(settings.schedule, settings.train.max_steps)
    power = 0.5 if schedule.decay == "square-root" else schedule.power
    return [
        ("opt_base_learning_rate", optimizer.learning_rate),
        *_of_rule(optimizer),
        ("opt_gradient_clip_norm", optimizer.clip_norm),
        ("opt_learning_rate_warmup_steps", schedule.warmup_steps),
        ("opt_lamb_learning_rate_decay_poly_power", power),
        ("start_warmup_step", schedule.start_warmup_step),
    ]


def _of_rule(optimizer: OptimizerSettings) -> list[tuple[str, Any]]:
    if optimizer.name == "lamb":
        names = ("opt_lamb_epsilon", "opt_epsilon", "opt_lamb_beta_1", "opt_lamb_beta_2", "opt_lamb_weight_decay_rate")
    else:
        rule = f"opt_{optimizer.name}"
        names = (f"{rule}_epsilon", "opt_epsilon", f"{rule}_beta_1", f"{rule}_beta_2", f"{rule}_weight_decay")
    epsilon = optimizer.epsilon
    values = (epsilon, epsilon, optimizer.beta1, optimizer.beta2, optimizer.weight_decay)
    return [("opt_name", optimizer.name), *zip(names, values, strict=True)]


def tensor_names(settings: Settings) -> list[str]:
    """The tensors of the model by TensorFlow's names, as every log of BERT has them."""
    from bertrain.weights.names import TENSORFLOW, absent_heads

    names, absent = [], absent_heads(nsp=settings.model.nsp)
    for name, place in TENSORFLOW.items():
        if not place.ours.startswith(absent):
            names += [name.format(layer) for layer in (range(settings.model.num_layers) if "{}" in name else (0,))]
    return names


# --- the probe ----------------------------------------------------------------------------------------------


def probe(settings: Settings, init: str) -> float:
    """Masked-word accuracy, before any training, of the weights to begin with: whether they and the data are MLPerf's.

    Raises UserError where it is further from mlperf.probe_accuracy than mlperf.probe_tolerance.
    """
    from bertrain.model.bert import Bert
    from bertrain.ranks import parallel
    from bertrain.training.compute import predictor
    from bertrain.training.evaluate import HeldOutEvaluator
    from bertrain.training.open_data import open_for
    from bertrain.training.precision import set_precision
    from bertrain.training.resolve_auto import settle
    from bertrain.weights.source import fill_in, read_weights

    check_settings(settings)
    settings, _ = settle(settings, None)
    about = settings.mlperf
    if not about.probe_accuracy or not init:
        raise AgreedError(
            "the probe compares the weights of --init with mlperf.probe_accuracy, and one is missing; give both"
        )
    set_precision(settings.train)
    with parallel.join(settings.train) as ranks:
        model = Bert(settings.model)
        parameters = {name: tensor.data for name, tensor in model.named_parameters()}
        extends = settings.train.init_positions == "extend"
        missing = fill_in(parameters, read_weights(init), extends_positions=extends)
        if missing:
            raise AgreedError(f"{init} has no {', '.join(missing)}, so there is nothing to probe")
        loader = Loader(open_for(settings.evaluate.data, settings, ranks), settings, rank=ranks.rank, world=ranks.world)
        held_out = HeldOutEvaluator(loader, settings.evaluate.max_examples, settings.model)
        predict = predictor(model.to(ranks.device), settings, ranks.device)
        accuracy = held_out.evaluate(predict, ranks)["mlm_accuracy"]
        if abs(accuracy - about.probe_accuracy) > about.probe_tolerance:
            raise AgreedError(
                f"before training, the weights of {init} guess {accuracy:.5f} of the masked words in "
                f"{settings.evaluate.data} right, where mlperf.probe_accuracy is {about.probe_accuracy:.5f} (give or "
                f"take {about.probe_tolerance:g}); check --init and evaluate.data, or set --mlperf.probe_accuracy 0"
            )
        return accuracy
