"""What a launcher tells the ranks that it starts: whether they take the place of ranks that failed."""

from __future__ import annotations

import os
import sys
import time

ROLLED_BACK = "BERTRAIN_ROLLED_BACK"  # tells ranks that the launcher has gone back to an older checkpoint already
FAILED = "BERTRAIN_FAILED"  # tells ranks that are started again what befell the ones before them, and when


def is_restart() -> bool:
    """Whether a launcher, ours or torchrun's, started this rank in the place of one that failed."""
    return FAILED in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def restart_reason() -> str:
    """What befell the ranks whose place these have taken; nothing, if there were none or it is not known."""
    return os.environ.get(FAILED, "").partition(" ")[2]


def was_rolled_back() -> bool:
    """Whether our launcher has gone back to the checkpoint that `--from-step` names, before it started any rank."""
    return ROLLED_BACK in os.environ


def report_recovery(step: int) -> None:
    """After the first step of ranks that were started again: how long nothing was trained. Said once."""
    failed = os.environ.pop(FAILED, "")
    if failed:
        ended, _, what = failed.partition(" ")
        print(
            f"bertrain: training went on at step {step}, {time.time() - float(ended):.1f} s after {what}",
            file=sys.stderr,
        )
