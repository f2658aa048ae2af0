"""The settings with which a model predicts: those of its run, or of weights in Transformers' format the usual ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from bertrain.base import isa
from bertrain.base.console import remark
from bertrain.base.errors import UserError
from bertrain.base.machine import is_first_rank
from bertrain.config.resolve import override
from bertrain.config.settings import BatchSettings, DataSettings, Settings, TaskSettings, TrainSettings
from bertrain.ranks.parallel import choose_device
from bertrain.run.folder import Run
from bertrain.training.engine import choose
from bertrain.training.precision import choose_precision
from bertrain.training.task_evaluator import TOKENS_AT_ONCE
from bertrain.weights.companions import FINETUNED_AS, is_transformers_folder
from bertrain.weights.hub import locate
from bertrain.weights.source import open_source
from bertrain.weights.tensors import OpenedWeights, Weights

NOT_HERE = ("precision-not-possible", "engine-not-possible", "unsupported-isa", "isa-capped", "isa-on-gpu")
"""Errors of settings that another machine can have."""
TASKS = {"classify": "classify", "multilabel": "classify", "regress": "classify", "span": "squad/v1.1", "tag": "tag"}
"""The task by head of weights that name none. Without a setting to say so, every question has an answer."""
TARGETS = {"classify": "class", "multilabel": "classes", "regress": "number"}


def is_weights(source: str | Path) -> bool:
    """Whether a source is a folder, or a file in one, of Transformers: what is neither can only be a run."""
    path = locate(source)
    return is_transformers_folder(path if path.is_dir() else path.parent)


def prediction_settings(source: str | Path) -> Settings:
    """The settings of a run; of weights, those with which they are evaluated and predict."""
    if not is_weights(source):
        return Run.open(source).settings
    weights = open_source(source)
    model = weights.settings
    if model is None or model.head != "pretrain":
        return finetuned_settings(weights, source)
    longest = model.max_positions
    data = DataSettings(max_seq_length=longest)
    return Settings(
        model=model,
        data=replace(data, max_predictions=data.usual_predictions()),
        batch=BatchSettings(sequences=1, token_budget=max(TOKENS_AT_ONCE["cpu"], longest)),
        train=TrainSettings(precision="fp32"),
    )


def fit_to_machine(settings: Settings) -> Settings:
    """Settings with which this machine can predict; says so if they differ from those of the run's own machine."""
    device = choose_device(settings.train.device)[0]
    any_kernels = replace(settings.train, kernels="auto", isa="auto")
    any_precision = replace(any_kernels, precision=choose_precision(any_kernels, device)[0])
    reason = ""
    for train in (settings.train, any_kernels, any_precision):
        tried = replace(settings, train=train)
        why_not = _why_not_here(tried, device)
        reason = reason or why_not
        if not why_not:
            break
    if reason and is_first_rank():
        remark(f"{reason}; predicting in {tried.train.precision}")
    return tried


def _why_not_here(settings: Settings, device: torch.device) -> str:
    try:
        choose(settings, device)
    except UserError as error:
        if error.code not in NOT_HERE:
            raise
        return str(error).partition(";")[0]
    return isa.emulation(settings.train.precision, settings.train.isa) if device.type == "cpu" else ""


def finetuned_settings(weights: Weights | OpenedWeights, source: str | Path) -> Settings:
    """The settings that weights were exported with; for weights that Transformers wrote, defaults in fp32."""
    model = weights.settings
    if model is None or model.head not in TASKS:
        raise without_task(source)
    usual = {"task.name": TASKS[model.head], "task.target": TARGETS.get(model.head, "class")}
    longest, question = model.max_positions, min(TaskSettings.max_query_length, model.max_positions // 2)
    usual |= {"data.max_seq_length": str(longest), "task.max_query_length": str(question), "train.precision": "fp32"}
    if not weights.finetuned_as:  # Transformers trains on words
        usual["task.text_split"] = "spaces"
    plain = Settings(model=replace(model, nsp=False), batch=BatchSettings(sequences=1, token_budget=0))
    return override(plain, usual | weights.finetuned_as, also=FINETUNED_AS)


def without_task(source: str | Path) -> UserError:
    cure = f"bertrain finetune classify --init {source} --data labels.csv --run runs/labels"
    return UserError("no-task", f"{source} was pre-trained, not fine-tuned for a task; fine-tune it first: {cure}")
