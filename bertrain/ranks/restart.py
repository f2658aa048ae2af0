"""Environment variables by which a launcher says that it restarts ranks after a failure."""

from __future__ import annotations

import os
import sys
import time

ROLLED_BACK = "BERTRAIN_ROLLED_BACK"  # the launcher has gone back to an older checkpoint already
FAILED = "BERTRAIN_FAILED"  # when the ranks before these failed, and how


def is_restart() -> bool:
    """Whether a launcher, ours or torchrun's, restarted this rank after a failure."""
    return FAILED in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def restart_reason() -> str:
    """How the ranks before these failed; empty if there were none or it is not known."""
    return os.environ.get(FAILED, "").partition(" ")[2]


def was_rolled_back() -> bool:
    """Whether our launcher has gone back to the checkpoint of `--from-step` before it started any rank."""
    return ROLLED_BACK in os.environ


def report_recovery(step: int) -> None:
    """Print, once, how long training was interrupted; called after the first step of restarted ranks."""
    failed = os.environ.pop(FAILED, "")
    if failed:
        ended, _, what = failed.partition(" ")
        after = f"{time.time() - float(ended):.1f} s after {what}"
        print(f"bertrain: training continued at step {step}, {after}", file=sys.stderr)
