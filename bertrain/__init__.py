"""bertrain: text to training data, pre-training, fine-tuning, evaluation and weights, on a CPU, a GPU or many.

The main verbs of the command line are functions here, for notebooks and scripts:

    import bertrain
    bertrain.prepare(["articles.txt"], "data", max_seq_length=128)
    bertrain.pretrain(bertrain.resolve("bert-tiny", [("train.max_steps", "200")]), "data", "runs/tiny")
    bertrain.evaluate("runs/tiny", "data")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Each function is imported when it is first used, so that `import bertrain` is fast. A test compares the two lists.
_MODULES = {
    "UserError": "base.errors",
    "cap_isa": "base.isa",
    "convert": "data.formats.convert",
    "data_stats": "data.feed.stats",
    "doctor": "base.doctor",
    "dry_run": "training.announce",
    "evaluate": "training.evaluate",
    "evaluate_task": "training.predict",
    "export": "weights.export",
    "extract": "data.text.extract",
    "fill_mask": "tasks.fill_mask",
    "finetune": "training.finetune",
    "import_weights": "weights.export",
    "look": "reports.watch",
    "pack": "data.formats.pack",
    "predict": "training.predict",
    "prepare": "data.prepare.prepare",
    "pretrain": "training.start",
    "recipe_names": "config.recipe",
    "report": "reports.report",
    "resolve": "config.resolve",
    "resolve_task": "training.task_settings",
    "resume": "training.start",
    "score": "tasks.score",
    "train_vocabulary": "data.text.vocabulary_training",
}
__all__ = sorted([*_MODULES, "__version__"])

if TYPE_CHECKING:
    from bertrain.base.doctor import doctor as doctor
    from bertrain.base.errors import UserError as UserError
    from bertrain.base.isa import cap_isa as cap_isa
    from bertrain.config.recipe import recipe_names as recipe_names
    from bertrain.config.resolve import resolve as resolve
    from bertrain.data.feed.stats import data_stats as data_stats
    from bertrain.data.formats.convert import convert as convert
    from bertrain.data.formats.pack import pack as pack
    from bertrain.data.prepare.prepare import prepare as prepare
    from bertrain.data.text.extract import extract as extract
    from bertrain.data.text.vocabulary_training import train_vocabulary as train_vocabulary
    from bertrain.reports.report import report as report
    from bertrain.reports.watch import look as look
    from bertrain.tasks.fill_mask import fill_mask as fill_mask
    from bertrain.tasks.score import score as score
    from bertrain.training.announce import dry_run as dry_run
    from bertrain.training.evaluate import evaluate as evaluate
    from bertrain.training.finetune import finetune as finetune
    from bertrain.training.predict import evaluate_task as evaluate_task
    from bertrain.training.predict import predict as predict
    from bertrain.training.start import pretrain as pretrain
    from bertrain.training.start import resume as resume
    from bertrain.training.task_settings import resolve_task as resolve_task
    from bertrain.weights.export import export as export
    from bertrain.weights.export import import_weights as import_weights
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
