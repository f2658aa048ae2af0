"""The initial bias of the masked-word output, zero or the words' frequencies: curves and held-out losses of both.

    python benchmarks/initial_bias.py TEXT... --held-out FILE --work FOLDER [--seeds 1 2] [--cases demo deep-3e-3]

Each case is trained with both biases, for the same steps and in the same order of data. `deep` is a model of 12 layers
of 64, which shows the plateau of BERT-Base in minutes on a CPU; `demo` is the recipe bert-demo, with and without its
heads on neighboring words. The vocabulary has 8,000 words of TEXT; the loss is that of FILE (a sentence per line),
prepared once with 15 % of the words masked. Writes benchmarks/results/initial_bias.json after each run; what FOLDER has
of an earlier start is not computed again.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from held_out import bertrain, evaluate, prepare, steps_of

from bertrain.base.machine import cpu_name

RESULTS = Path(__file__).parent / "results" / "initial_bias.json"
BIASES = ("zero", "frequencies")
WORDS = 8000  # of the vocabulary
CURVE_STEPS = 50  # of which a point of the curve is the mean
DEEP = {
    "model.hidden_size": 64, "model.num_layers": 12, "model.num_heads": 2, "model.intermediate_size": 256,
    "model.max_positions": 128, "model.hidden_dropout": 0, "model.attention_dropout": 0, "batch.sequences": 0,
    "batch.tokens": 2048, "batch.token_budget": 2048, "optimizer.name": "adamw", "optimizer.beta2": 0.98,
    "schedule.warmup_steps": 60, "train.max_steps": 1000,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "deep-3e-3": ("bert-tiny", DEEP | {"optimizer.learning_rate": 3e-3}),
    "deep-3e-3, neighbours": (
        "bert-tiny", DEEP | {"optimizer.learning_rate": 3e-3, "model.initial_heads": "neighbours"},
    ),
    "demo": ("bert-demo", {}),
    "demo, random heads": ("bert-demo", {"model.initial_heads": "random"}),
}  # fmt: skip


def measure(work: Path, case: str, bias: str, seed: int) -> dict[str, Any]:
    recipe, settings = CASES[case]
    run = work / f"run-{case.replace(', ', '-').replace(' ', '-')}-{bias}-{seed}"
    if not (run / "metrics.jsonl").exists():
        given = settings | {"model.vocab_size": 0, "model.initial_bias": bias, "train.precision": "fp32"}
        options = [word for name, value in given.items() for word in (f"--{name}", value)]
        quiet = ("--log.level", "quiet", "--log.every_steps", 1)
        bertrain("pretrain", recipe, "--data", work / "data", "--run", run, "--seed", seed, *options, *quiet)
    losses = [step["mlm_loss"] for step in steps_of(run)]
    starts = range(0, len(losses), CURVE_STEPS)
    return {
        "case": case,
        "bias": bias,
        "seed": seed,
        "steps": len(losses),
        **evaluate(run, work),
        "curve": [round(sum(part) / len(part), 4) for part in (losses[at : at + CURVE_STEPS] for at in starts)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    prepare(options.work, options.texts, options.held_out, WORDS)
    record: dict[str, Any] = {
        "text_bytes": sum(path.stat().st_size for path in options.texts), "curve_steps": CURVE_STEPS,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
        "torch": torch.__version__, "python": platform.python_version(), "rows": [],
    }  # fmt: skip
    for seed in options.seeds:
        for case in options.cases:
            for bias in BIASES:
                row = measure(options.work, case, bias, seed)
                record["rows"].append(row)
                print({name: value for name, value in row.items() if name != "curve"}, flush=True)
                options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
