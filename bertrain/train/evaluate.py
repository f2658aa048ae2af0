"""Held-out loss and accuracy, with masks that never change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from bertrain.data.loader import Loader
from bertrain.data.source import open_data
from bertrain.errors import UserError
from bertrain.model.bert import Bert
from bertrain.model.heads import pretraining_sums
from bertrain.observe.console import warn
from bertrain.observe.metrics import averages
from bertrain.settings import TrainSettings
from bertrain.train import checkpoint, parallel
from bertrain.train.precision import autocast, set_precision
from bertrain.train.runs import Run, refuse_other_vocabulary


def evaluate(
    run: str | Path, data: str | Path, *, max_examples: int = 0, device: Literal["auto", "cpu", "cuda"] = "auto"
) -> dict[str, float]:
    """Loss and accuracy of a run's newest whole checkpoint on a prepared folder, and the step it stands at."""
    opened = Run.open(run)
    train = replace(opened.settings.train, device=device)
    shards = open_data(data, vocab=opened.vocabulary(), verify=opened.settings.data.verify)
    refuse_other_vocabulary(shards, opened.vocabulary_hash)
    newest, warnings = checkpoint.newest_whole(opened.checkpoints)
    for warning in warnings:
        warn(warning)
    if newest is None:
        raise UserError(f"the run {run} has no whole checkpoint to evaluate yet")
    set_precision(train)
    with parallel.join(train) as ranks:
        loader = Loader(shards, opened.settings, rank=ranks.rank, world=ranks.world)
        model = Bert(opened.settings.model).to(ranks.device)
        model.load_state_dict(checkpoint.read_weights(newest))
        result = evaluate_model(model, loader, ranks, train, max_examples)
    return {"step": float(checkpoint.read_progress(newest).step)} | result


@torch.no_grad()
def evaluate_model(
    model: Bert, loader: Loader, ranks: parallel.Ranks, settings: TrainSettings, max_examples: int
) -> dict[str, float]:
    """Averages over the whole evaluation set, each rank computing its share; dropout off."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
    counts = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    words = torch.zeros(model.settings.vocab_size, dtype=torch.float64, device=ranks.device)
    hidden = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # right ones, and all
    mask_id = loader.shards.vocabulary.id_of("[MASK]")
    for batch in loader.evaluation(max_examples):
        moved = batch.to(ranks.device)
        with autocast(settings, ranks.device):
            outputs = model(moved)
        sums += pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, moved).stack()
        counts += torch.tensor([batch.num_predictions, batch.num_sequences], device=ranks.device)
        is_hidden = (moved.input_ids[moved.mlm_positions] == mask_id) & (moved.mlm_labels >= 0)
        is_right = outputs.mlm_logits.argmax(-1) == moved.mlm_labels
        hidden += torch.stack([(is_right & is_hidden).sum(), is_hidden.sum()])
        words += torch.bincount(moved.mlm_labels[moved.mlm_labels >= 0], minlength=len(words))
    ranks.sum(sums, counts, words, hidden)
    model.train(was_training)
    num_predictions, num_sequences = map(int, counts.tolist())
    result = averages(sums, num_predictions, num_sequences, nsp=model.settings.nsp)
    # What a model that always says the same word would get, at best: the yardstick of having learnt anything. A tenth
    # of the words asked for stand there unmasked, and can be copied; those behind [MASK] are counted apart.
    return result | {
        "hidden_accuracy": float(hidden[0] / hidden[1].clamp(min=1)),
        "constant_accuracy": float(words.max()) / num_predictions,
        "examples": float(num_sequences),
    }
