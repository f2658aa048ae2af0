"""bertrain: text to training data, pre-training, fine-tuning, evaluation and weights, on a CPU, a GPU or many.

The main commands of the command line are functions here, for notebooks and scripts:

    import bertrain
    bertrain.prepare("articles.txt", "data", max_seq_length=128)
    bertrain.pretrain(bertrain.resolve("bert-tiny", {"train.max_steps": 200}), "data", "runs/tiny")
    bertrain.evaluate("runs/tiny", "held-out")

Other functions stand in the modules of the package, such as `bertrain.weights.export.import_weights`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Each function is imported when it is first used, so that `import bertrain` is fast. A test compares the two lists.
_MODULES = {
    "Settings": "config.settings",
    "UserError": "base.errors",
    "embed": "training.embed",
    "evaluate": "training.evaluate",
    "export": "weights.export",
    "extract": "data.text.extract",
    "fill_mask": "training.fill_mask",
    "finetune": "training.finetune",
    "predict": "training.predict",
    "prepare": "data.prepare.prepare",
    "pretrain": "training.start",
    "recipe_names": "config.recipe",
    "report": "reports.report",
    "resolve": "config.resolve",
    "resolve_task": "training.task_settings",
    "resume": "training.start",
    "sweep": "pipeline.sweep",
    "train": "pipeline.train",
    "train_vocabulary": "data.text.vocabulary_training",
}
__all__ = sorted([*_MODULES, "__version__"])

if TYPE_CHECKING:
    from bertrain.base.errors import UserError as UserError
    from bertrain.config.recipe import recipe_names as recipe_names
    from bertrain.config.resolve import resolve as resolve
    from bertrain.config.settings import Settings as Settings
    from bertrain.data.prepare.prepare import prepare as prepare
    from bertrain.data.text.extract import extract as extract
    from bertrain.data.text.vocabulary_training import train_vocabulary as train_vocabulary
    from bertrain.pipeline.sweep import sweep as sweep
    from bertrain.pipeline.train import train as train
    from bertrain.reports.report import report as report
    from bertrain.training.embed import embed as embed
    from bertrain.training.evaluate import evaluate as evaluate
    from bertrain.training.fill_mask import fill_mask as fill_mask
    from bertrain.training.finetune import finetune as finetune
    from bertrain.training.predict import predict as predict
    from bertrain.training.start import pretrain as pretrain
    from bertrain.training.start import resume as resume
    from bertrain.training.task_settings import resolve_task as resolve_task
    from bertrain.weights.export import export as export
else:  # a type checker that saw this function would accept any name

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"bertrain has no {name!r}")
        import importlib

        value = getattr(importlib.import_module(f"bertrain.{_MODULES[name]}"), name)
        globals()[name] = value  # a submodule of the same name must not take its place later
        return value


def __dir__() -> list[str]:
    return __all__
