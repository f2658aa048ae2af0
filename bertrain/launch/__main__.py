"""`python -m bertrain.launch node|rank|ssh JOB preflight|training`: run by a job's script, not by people."""

from __future__ import annotations

import sys

from bertrain.base.errors import UserError
from bertrain.launch.job import read_job


def main(role: str, folder: str, stage: str) -> int:
    job = read_job(folder)
    if role == "ssh":
        from bertrain.launch.remote import run_hosts

        return run_hosts(job, stage)
    from bertrain.launch.node import exec_rank, run_node

    if role == "rank":
        exec_rank(job, stage)
    return run_node(job, stage)


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    except UserError as error:
        print(f"bertrain: {error} [{error.code}]", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
