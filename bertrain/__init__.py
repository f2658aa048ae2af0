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
    "UserError": "errors",
    "Wishes": "launch.job",
    "benchmark": "train.benchmark",
    "bin_by_length": "data.convert",
    "cancel_job": "launch.submit",
    "cap_isa": "train.isa",
    "check_results": "mlperf.check",
    "compare_weights": "weights.inspect",
    "convert": "data.convert",
    "data_stats": "data.stats",
    "doctor": "doctor",
    "download": "data.download",
    "dry_run": "train.announce",
    "eval_set": "data.convert",
    "evaluate": "train.evaluate",
    "export": "weights.export",
    "extract": "data.extract",
    "fill_mask": "tasks.fill_mask",
    "finetune": "train.finetune",
    "finetune_many": "train.finetune",
    "import_weights": "weights.export",
    "inspect_data": "data.inspect",
    "job_logs": "launch.submit",
    "job_status": "launch.submit",
    "judge_run": "train.finetune",
    "logs": "observe.logs",
    "look": "observe.watch",
    "make_job": "launch.job",
    "mlperf_data": "data.mlperf_data",
    "pack": "data.pack",
    "plot_logs": "mlperf.show",
    "predict": "train.finetune",
    "preflight_job": "launch.preflight",
    "prepare": "data.prepare",
    "pretrain": "train.pretrain",
    "probe": "mlperf.experiment",
    "profile": "observe.profile",
    "profile_report": "observe.profile_report",
    "read_roofline": "observe.profile_report",
    "recipe_names": "config",
    "report": "observe.report",
    "resolve": "config",
    "resolve_task": "train.finetune",
    "resume": "train.pretrain",
    "run_experiment": "mlperf.experiment",
    "run_experiments": "mlperf.run",
    "score": "tasks.score",
    "show_logs": "mlperf.show",
    "show_weights": "weights.inspect",
    "submit_job": "launch.submit",
    "train_vocabulary": "data.tokenizer",
    "verify": "data.verify",
    "watch": "observe.watch",
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
