"""Held-out loss and accuracy of pre-training, with masks that never change."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bertrain.base.console import remark
from bertrain.base.errors import UserError
from bertrain.base.formatting import duration
from bertrain.base.machine import is_first_rank
from bertrain.config.choices import MASK_PROBABILITY, Device
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader, has_pairs
from bertrain.data.formats.source import DataSource, open_data
from bertrain.model.batch import Batch
from bertrain.model.encoder import Outputs
from bertrain.model.heads import pretraining_sums
from bertrain.model.sums import packed_sums
from bertrain.ranks import parallel
from bertrain.ranks.signals import NEVER, StopSignal
from bertrain.run.folder import refuse_other_vocabulary
from bertrain.run.metrics import averages
from bertrain.training.engine import Predictor, predictor
from bertrain.training.precision import set_precision
from bertrain.weights.source import build_model, read_weights, vocabulary_of
from bertrain.weights.tensors import Weights

KEPT_BYTES = 1 << 30  # of a rank's held-out batches on its device; if they are larger, they are built each time


def evaluate(
    run: str | Path,
    data: str | Path | None = None,
    *,
    which: str = "newest",
    max_examples: int = 0,
    device: Device = "auto",
) -> dict[str, float]:
    """Loss and accuracy of a run on a prepared folder, or of a fine-tuned one on its task; and the checkpoint's step.

    `run` may also be weights in Transformers' format. Without `data`, a run is evaluated on the held-out data of its
    training. `which` is the `newest` whole checkpoint, the `best` one, or the number of a step.

    Example: bertrain.evaluate("runs/tiny", "data")["mlm_accuracy"]
    """
    from bertrain.training.prediction_settings import fit_to_machine, prediction_settings

    settings = prediction_settings(run)
    if settings.task.name:
        from bertrain.training.predict import evaluate_task

        refuse_max_examples(max_examples)
        return evaluate_task(run, data, which=which, device=device)
    settings = fit_to_machine(replace(settings, train=replace(settings.train, device=device)))
    if data is None:
        data = settings.evaluate.data
        if not data:
            raise UserError("missing-option", "--data is missing; give the prepared folder to evaluate on")
        if is_first_rank():
            remark(f"evaluating on {data}, the run's evaluate.data; --data names another folder")
    weights = read_weights(run, which)
    vocabulary = vocabulary_of(weights, run)
    held_out = open_data(data, vocab=vocabulary, verify=settings.data.verify, quiet=not is_first_rank())
    refuse_other_vocabulary(held_out, vocabulary.hash)
    if settings.model.nsp and not has_pairs(held_out):
        settings = replace(settings, model=replace(settings.model, nsp=False))
        if is_first_rank():
            remark(f"{data} has no pairs, so next-sentence prediction is not evaluated")
    with load_predictor(weights, settings) as (predict, ranks):
        evaluator = HeldOutEvaluator(held_out, settings, ranks, max_examples)
        with reporting(predict, evaluator.num_examples // ranks.world) as reported:
            result = evaluator.evaluate(reported, ranks)
    return ({} if weights.global_step is None else {"step": float(weights.global_step)}) | result


@contextmanager
def reporting(predict: Predictor, total: int) -> Iterator[Predictor]:
    """`predict` that reports how many of `total` examples are done: a bar on a terminal, else a line every 10 s.

    The bar is erased at the end, so that the result does not continue its line.
    """
    began = last = time.monotonic()
    done, on_terminal = 0, sys.stderr.isatty()

    def predict_and_report(batch: Batch) -> Outputs:
        nonlocal last, done
        outputs = predict(batch)
        done, now = done + batch.num_sequences, time.monotonic()
        if is_first_rank() and now - last >= (0.5 if on_terminal else 10.0):
            last, share = now, min(1.0, done / max(1, total))
            text = f"{done:,} of {total:,} examples  {duration((now - began) * (1 / share - 1))} left"
            bar = "█" * round(30 * share)
            print(f"\r{bar:░<30}  {text}  " if on_terminal else text, end="" if on_terminal else "\n", file=sys.stderr)
        return outputs

    try:
        yield predict_and_report
    finally:
        if on_terminal and last != began:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def load_predictor(weights: Weights, settings: Settings) -> Iterator[tuple[Predictor, parallel.Ranks]]:
    """The model of some weights on the device of this rank, ready to predict, and all ranks."""
    set_precision(settings.train)
    with parallel.join(settings.train) as ranks:
        yield predictor(build_model(weights).to(ranks.device), settings, ranks.device), ranks


def with_bert_masks(settings: Settings) -> Settings:
    """Settings that mask BERT's share of the tokens: so losses of runs that train with other shares can be compared."""
    data = settings.data
    if data.mask_probability == MASK_PROBABILITY:
        return settings
    data = replace(data, mask_probability=MASK_PROBABILITY)
    return replace(settings, data=replace(data, max_predictions=data.usual_predictions()))


def refuse_max_examples(max_examples: int) -> None:
    """Refuse to evaluate a fine-tuned model on a part of its held-out examples."""
    if max_examples:
        advice = "leave it out: a task uses all held-out examples"
        raise UserError("pretraining-only", f"--max-examples is for pre-trained runs; {advice}")


class HeldOutEvaluator:
    """Evaluates on a rank's share of the held-out batches, which stay on the device if they fit."""

    main_metric = "mlm_accuracy"
    """The metric by which one result is better than another."""
    can_shrink = True
    """Whether it may evaluate on fewer examples."""
    by_class = ()
    """The scores of each class; pre-training has none."""

    def __init__(self, data: DataSource, settings: Settings, ranks: parallel.Ranks, max_examples: int) -> None:
        self._mask_id, self._model = data.vocabulary.id_of("[MASK]"), settings.model
        on_gpu = ranks.device.type == "cuda"
        self._loader = Loader(data, with_bert_masks(settings), rank=ranks.rank, world=ranks.world, pin_memory=on_gpu)
        self.shrink(min(max_examples or len(data), len(data)))

    def shrink(self, num_examples: int) -> None:
        """Evaluate on only `num_examples` examples after this."""
        self.num_examples, self._kept, self._is_whole = num_examples, list[Batch](), False

    def batches(self, device: torch.device) -> Iterator[Batch]:
        """The batches, the same each time, on `device`."""
        if self._is_whole:
            yield from self._kept
            return
        kept, free_bytes = list[Batch](), KEPT_BYTES
        for batch in self._loader.evaluation(self.num_examples):
            moved = batch.to(device)
            free_bytes -= moved.num_bytes
            if free_bytes >= 0:
                kept.append(moved)
            else:
                kept.clear()
            yield moved
        if free_bytes >= 0:
            self._kept, self._is_whole = kept, True

    @torch.no_grad()
    def evaluate(self, predict: Predictor, ranks: parallel.Ranks, stop: StopSignal = NEVER) -> dict[str, float]:
        """All metrics; each rank computes its share. Empty if a signal to `stop` ended it on a rank."""
        sums = packed_sums(device=ranks.device)
        counts = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        words = torch.zeros(self._model.vocab_size, dtype=torch.float64, device=ranks.device)
        hidden = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # correct ones, and all
        ranks.heartbeat.enter("evaluation")
        for batch in self.batches(ranks.device):
            if stop.received:
                break
            ranks.heartbeat.move()
            outputs = predict(batch)
            assert outputs.mlm_logits is not None
            nsp_logits = outputs.nsp_logits if self._model.nsp else None  # its head may be there all the same
            sums += pretraining_sums(outputs.mlm_logits, nsp_logits, batch).pack()
            counts += torch.tensor([batch.num_predictions, batch.num_sequences], device=ranks.device)
            is_hidden = (batch.input_ids[batch.mlm_positions] == self._mask_id) & (batch.mlm_labels >= 0)
            is_right = outputs.mlm_logits.argmax(-1) == batch.mlm_labels
            hidden += torch.stack([(is_right & is_hidden).sum(), is_hidden.sum()])
            words += torch.bincount(batch.mlm_labels[batch.mlm_labels >= 0], minlength=len(words))
        if ranks.all_max(stop.request):
            return {}
        ranks.all_reduce_sum(sums, counts, words, hidden)
        num_predictions, num_sequences = map(int, counts.tolist())
        result = averages(sums, num_predictions, num_sequences, self._model)
        # The best that a model could do that always predicts the same word is a baseline. A tenth of the words to
        # predict are not masked, and can be copied; those behind [MASK] are counted apart.
        return result | {
            "hidden_accuracy": float(hidden[0] / hidden[1].clamp(min=1)),
            "constant_accuracy": float(words.max()) / max(1, num_predictions),
            "examples": float(num_sequences),
        }
