"""bertrain: text to training data, pre-training, fine-tuning, evaluation and weights, on a CPU, a GPU or many.

Every verb of the command line is a function here, for notebooks and scripts:

    import bertrain
    bertrain.prepare(["articles.txt"], "data", max_seq_length=128)
    bertrain.pretrain(bertrain.resolve("bert-tiny", [("train.max_steps", "200")]), "data", "runs/tiny")
    bertrain.evaluate("runs/tiny", "data")
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

# Where each function lives; imported when it is first asked for, so that `import bertrain` costs nothing.
_HOMES = {
    "UserError": "base.errors",
    "JobSpec": "launch.job",
    "benchmark": "training.benchmark",
    "bin_by_length": "data.formats.convert",
    "cancel_job": "launch.submit",
    "cap_isa": "base.isa",
    "check_results": "mlperf.check",
    "compare_weights": "weights.inspect",
    "convert": "data.formats.convert",
    "data_stats": "data.feed.stats",
    "doctor": "base.doctor",
    "download": "data.text.download",
    "dry_run": "training.announce",
    "eval_set": "data.formats.convert",
    "evaluate": "training.evaluate",
    "export": "weights.export",
    "extract": "data.text.extract",
    "fill_mask": "tasks.fill_mask",
    "finetune": "training.finetune",
    "finetune_many": "training.finetune",
    "import_weights": "weights.export",
    "inspect_data": "data.formats.inspect",
    "job_logs": "launch.submit",
    "job_status": "launch.submit",
    "evaluate_task": "training.predict",
    "logs": "base.logs",
    "look": "reports.watch",
    "make_job": "launch.job",
    "mlperf_data": "mlperf.data",
    "pack": "data.formats.pack",
    "plot_logs": "mlperf.show",
    "plot_stats": "reports.data_plots",
    "predict": "training.predict",
    "preflight_job": "launch.preflight",
    "prepare": "data.prepare.prepare",
    "pretrain": "training.start",
    "probe_initial_weights": "mlperf.experiment",
    "profile": "profiling.profile",
    "profile_report": "profiling.profile_report",
    "read_roofline": "profiling.profile_report",
    "recipe_names": "config.resolve",
    "report": "reports.report",
    "resolve": "config.resolve",
    "resolve_task": "training.task_settings",
    "resume": "training.start",
    "run_experiment": "mlperf.experiment",
    "run_experiments": "mlperf.run",
    "score": "tasks.score",
    "show_logs": "mlperf.show",
    "show_weights": "weights.inspect",
    "submit_job": "launch.submit",
    "train_vocabulary": "data.text.vocabulary_training",
    "verify": "data.formats.verify",
    "watch": "reports.watch",
}
__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"bertrain has no {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"bertrain.{_HOMES[name]}"), name)
    globals()[name] = value  # a submodule of the same name must not take its place later
    return value


def __dir__() -> list[str]:
    return __all__
