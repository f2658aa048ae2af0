"""How long the report of a run of a million steps takes, and how much memory; and what a look at it costs.

    python benchmarks/observe_report.py [--steps 1000000]

Makes a run folder whose metrics are those of a real run in every field, numbers drawn at random, on one rank and on
eight, with a day of telemetry beside it; reports on it in a process of its own. Writes
benchmarks/results/observe_report.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow

from bertrain.base.machine import cpu_name
from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings

HERE = Path(__file__).parent
SAMPLES = 864_000  # of a day, every 100 ms

MEASURED = """
import json, resource, sys, time
began = time.perf_counter()
from {module} import {function}
{call}
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({{"seconds": time.perf_counter() - began, "cpu_seconds": usage.ru_utime + usage.ru_stime,
                   "peak_mb": usage.ru_maxrss / 1024, "imported_torch": "torch" in sys.modules}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    results = []
    for ranks in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            make_run(run, steps, ranks)
            result: dict[str, Any] = {"steps": steps, "ranks": ranks}
            result["metrics_mb"] = (run / "metrics.jsonl").stat().st_size / 1e6
            result["telemetry_mb"] = (run / "telemetry.csv").stat().st_size / 1e6
            result["report"] = measure("bertrain.reports.report", "report", f"report([{str(run)!r}])")
            result["look"] = measure("bertrain.reports.watch", "look", f"look({str(run)!r})")
            page = (run / "report.html").read_text()
            result["page_kb"] = len(page) / 1e3
            result["says"] = re.findall(r"Each point is the mean of [\d,]+ steps\.", page)
        results.append(result)
        print(
            f"{steps:,} steps on {ranks} ranks, {result['metrics_mb']:.0f} MB: report in "
            f"{result['report']['seconds']:.1f} s ({result['report']['cpu_seconds']:.1f} s of processor) and "
            f"{result['report']['peak_mb']:.0f} MB; a look in {result['look']['seconds']:.2f} s"
        )
    machine = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "pyarrow": pyarrow.__version__,
        "matplotlib": matplotlib.__version__,
    }
    told = {"what": "report and look of a run of many steps", "results": results, "machine": machine}
    (HERE / "results" / "observe_report.json").write_text(json.dumps(told, indent=1) + "\n")


def measure(module: str, function: str, call: str) -> dict[str, Any]:
    """Seconds, and the most memory, of one call in a process of its own, imports included."""
    program = MEASURED.format(module=module, function=function, call=call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def make_run(run: Path, steps: int, ranks: int) -> None:
    """A run folder as `pretrain` leaves it, without checkpoints."""
    run.mkdir()
    settings: Settings = resolve("bert-base-phase1", [("train.max_steps", str(steps))])
    config = {
        "schema_version": 1,
        "settings": settings.to_dict(),
        "data": {"folder": "/nowhere", "fingerprint": "0" * 64, "vocabulary": "0" * 64, "lower_case": True},
        "init": {"source": "", "fingerprint": ""},
    }
    (run / "config.json").write_text(json.dumps(config))
    (run / "environment.json").write_text(json.dumps([{"started": "now", "host": "here", "ranks": ranks}]))
    draw = np.random.default_rng(0)
    of_ranks = {"rank_tokens": [2500] * ranks, "rank_attention": [640000] * ranks} if ranks > 1 else {}
    with open(run / "metrics.jsonl", "w") as file:
        for first in range(1, steps + 1, 10):
            noise = draw.random((10, 8)).tolist()
            for number, (a, b, c, d, e, f, g, h) in enumerate(noise, start=first):
                loss = 1.5 + 7 * (1 - number / steps) ** 3 + 0.2 * a
                seconds = {
                    "data": b / 1e3,
                    "forward_backward": 0.1 + c / 1e2,
                    "reduction": d / 1e3,
                    "optimizer": e / 1e3,
                }
                record = {
                    "kind": "step", "step": number, "samples": 256 * number, "tokens": 20000 + int(500 * a),
                    "loss": loss, "mlm_loss": loss - 0.6, "mlm_accuracy": 1 - loss / 9, "nsp_loss": 0.6 + f / 10,
                    "nsp_accuracy": 0.7 + g / 10, "learning_rate": 4e-4 * (1 - number / steps),
                    "gradient_norm": 1 + h,
                    "applied": True, "skipped": False, "not_finite": 0, "spike": False, "tokens_per_s": 2e5 + 1e3 * a,
                    "seconds": seconds, "idle_share": a / 100, "padding_share": b / 100, **of_ranks,
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
            if ranks > 1:
                told = [{"rank": rank, "host": "here", "tokens": 2500.0, "seconds": seconds} for rank in range(ranks)]
                file.write(json.dumps({"kind": "ranks", "step": first + 9, "ranks": told}) + "\n")
    with open(run / "telemetry.csv", "w") as file:
        file.write("time,monotonic,sm_clock_mhz,power_w,temperature_c,gpu_utilisation,memory_used_bytes,energy_j\n")
        power = (650 + 20 * draw.standard_normal(SAMPLES)).tolist()
        for number, watts in enumerate(power):
            moment = number / 10
            file.write(f"{1.7e9 + moment:.6f},{moment:.6f},1755,{watts:.1f},61,0.98,75161927680,{65 * number}\n")


if __name__ == "__main__":
    main()
