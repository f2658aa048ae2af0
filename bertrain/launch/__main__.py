"""`python -m bertrain.launch node|rank|ssh JOB preflight|training`: what the script of a job runs; people do not."""

from __future__ import annotations

import sys

from bertrain.base.errors import UserError
from bertrain.launch.job import read_job


def main(role: str, folder: str, what: str) -> int:
    job = read_job(folder)
    if role == "rank":
        from bertrain.launch.node import become_rank

        become_rank(job, what)
    if role == "ssh":
        from bertrain.launch.remote import run_hosts

        return run_hosts(job, what)
    from bertrain.launch.node import run_node

    return run_node(job, what)


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    except UserError as error:
        print(f"bertrain: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
