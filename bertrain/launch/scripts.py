"""The script of a job, one for each launcher: plain bash, complete, and the same each time it is written.

All of them share their end, which runs a step on every node (the pre-flight, then the training), passes signals on,
starts ranks again that failed, and leaves word of each in the job folder. They differ in what a scheduler is asked for,
in how a step is started on every node, and in how a job is put back into the queue.
"""

from __future__ import annotations

import re
import shlex

from bertrain.launch.job import HOSTS, SCRIPT, Job, parse_time, write_time
from bertrain.launch.local import SAVING_S

AFTER_SAVING_S = 30


def job_script(job: Job) -> str:
    """The whole script."""
    begin, start, requeue = {
        "local": _local,
        "ssh": _ssh,
        "slurm": _slurm,
        "pbs": _pbs,
        "mpi": _mpi,
    }[job.launcher](job)
    return "\n".join(["#!/bin/bash", *begin, *_head(job), *start, *_repeat(job), requeue, END])


def _head(job: Job) -> list[str]:
    quoted = {name: shlex.quote(value) for name, value in job.environment.items()}
    nodes = len(job.hosts) or job.spec.nodes
    return [
        "",
        f"# Written by `bertrain launch {job.launcher}`, {job.created}; it can be submitted again as it is.",
        f"#   each rank runs: bertrain {shlex.join(job.command(1 if job.spec.repeats > 1 else 0))}",
        f"#   on {nodes} node(s), {job.world} rank(s) in all; code: {job.describe_code()}",
        "",
        f"job={shlex.quote(str(job.folder))}",
        f"python={shlex.quote(job.python)}",
        f"restarts={job.spec.restarts}",
        f"preflight={'yes' if job.spec.preflight else ''}",
        *(f"export {name}={value}" for name, value in quoted.items()),
        "",
    ]


def _starts(words: list[str], comment: str) -> list[str]:
    """The function that becomes the command which runs a step."""
    return [f"# {comment}", "start_step() {", "    exec " + " \\\n        ".join(words), "}"]


def _ours(job: Job, what: str) -> list[str]:
    """Our own part of that command, in its container if there is one."""
    return [*in_container(job), f'"$python" -u -m bertrain.launch {what} "$job" "$@"']


def in_container(job: Job) -> list[str]:
    """The words before Python that take it into a container of Apptainer; pyxis is asked for at srun's door."""
    spec = job.spec
    if not spec.container or spec.runtime != "apptainer":
        return []
    mounts = [f"--bind {shlex.quote(mount)}" for mount in spec.mounts.split(",") if mount]
    gpu = ["--nv"] if spec.gpus_per_node else []
    return [" ".join(["apptainer exec", *gpu, *mounts, shlex.quote(spec.container)])]


def _repeat(job: Job) -> list[str]:
    """Which repeats this script is for (0: there are none), and where their run is kept."""
    one_after_another = f'$(seq -s " " {job.spec.repeats})'  # also in an allocation that is no array
    array = {
        "slurm": f'"${{SLURM_ARRAY_TASK_ID:-{one_after_another}}}"',
        "pbs": f'"${{BERTRAIN_ONLY:-${{PBS_ARRAY_INDEX:-{one_after_another}}}}}"',
    }.get(job.launcher)
    numbers = "0" if job.spec.repeats == 1 else array or f'"{one_after_another}"'
    return ["", f"repeats={numbers}", f"run={shlex.quote(job.run)}", ""]


def _local(job: Job) -> tuple[list[str], list[str], str]:
    alone = ["export BERTRAIN_NODE=0 BERTRAIN_NODES=1", ""]  # even inside somebody's allocation of several
    return [], [*alone, *_starts(_ours(job, "node"), "One node, this one."), *_timer(job)], NO_REQUEUE


OVER_SSH = "One ssh for each host; words and signals go through it, and nothing is left behind when it breaks."


def _ssh(job: Job) -> tuple[list[str], list[str], str]:
    start = _starts(['"$python" -u -m bertrain.launch ssh "$job" "$@"'], OVER_SSH)
    return [], [f'export BERTRAIN_HOSTS="$job/{HOSTS}"', "", *start, *_timer(job)], NO_REQUEUE


def _mpi(job: Job) -> tuple[list[str], list[str], str]:
    spec = job.spec
    placed = f'--hostfile "$job/{HOSTS}" --map-by slot' if job.hosts else f"--map-by ppr:{spec.ranks_per_node}:node"
    names = ["BERTRAIN_START", "BERTRAIN_REPEAT", "BERTRAIN_FAILED", *job.environment]
    words = [
        f"{spec.mpirun} -np {job.world} {placed} --bind-to none",
        " ".join(f"-x {name}" for name in names),
        *_ours(job, "rank"),
    ]
    start = _starts(
        words, "mpirun starts the ranks, which talk over torch.distributed. It passes USR1 on, and not TERM."
    )
    return (
        [],
        ["passed_on_as=USR1", "export BERTRAIN_REPEAT='' BERTRAIN_FAILED=''", "", *start, *_timer(job)],
        NO_REQUEUE,
    )


def _slurm(job: Job) -> tuple[list[str], list[str], str]:
    spec = job.spec
    gres = spec.gres or (f"gpu:{spec.gpus_per_node}" if spec.gpus_per_node else "")
    asked = {
        "job-name": _job_name(job),
        "nodes": str(spec.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(spec.cpus_per_node or ""),
        "gres": gres,
        "time": write_time(parse_time(spec.time, "--time")) if spec.time else "",
        "partition": spec.partition,
        "account": spec.account,
        "constraint": spec.constraint,
        "nodelist": spec.nodelist,
        "array": f"1-{spec.repeats}" if spec.repeats > 1 else "",
        "signal": f"B:USR1@{parse_time(spec.warning, '--warning')}",
        "output": f"{str(job.folder).replace('%', '%%')}/logs/{'job-%A_%a' if spec.repeats > 1 else 'job-%j'}.log",
        "open-mode": "append",
    }
    begin = [f"#SBATCH --{name}={_directive(value)}" for name, value in asked.items() if value]
    begin += ["#SBATCH --requeue"]
    begin += [] if spec.cpus_per_node else ["#SBATCH --exclusive", "#SBATCH --mem=0"]
    words = [
        f"srun --nodes={spec.nodes} --ntasks={spec.nodes} --ntasks-per-node=1",
        '--cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none',
        *([f"--gres={shlex.quote(gres)}"] if gres else []),
        f"--mpi={spec.mpi} --kill-on-bad-exit=0 --wait={SAVING_S + AFTER_SAVING_S}",
    ]
    if spec.container and spec.runtime == "pyxis":
        mounts = f" --container-mounts={shlex.quote(spec.mounts)}" if spec.mounts else ""
        words.append(f"--container-image={shlex.quote(spec.container)}{mounts}")
    start = _starts([*words, *_ours(job, "node")], "One task on each node, which starts the ranks of that node.")
    return begin, start, SLURM_REQUEUE


def _directive(value: str) -> str:
    """A value as schedulers read it; `make_job` has refused what quotation marks would not hold together."""
    return value if re.fullmatch(r"[\w./:=@%+,&|()*\[\]-]+", value) else f'"{value}"'


def _job_name(job: Job) -> str:
    """A name that every scheduler takes."""
    return re.sub(r"[^\w.+-]", "_", job.name, flags=re.ASCII)


def _pbs(job: Job) -> tuple[list[str], list[str], str]:
    spec = job.spec
    chunk = [f"{spec.nodes}"]
    chunk += [f"ncpus={spec.cpus_per_node}"] if spec.cpus_per_node else []
    chunk += [f"ngpus={spec.gpus_per_node}"] if spec.gpus_per_node else []
    begin = [f"#PBS -N {_job_name(job)[:15]}", f"#PBS -l select={spec.select or ':'.join(chunk)}"]
    begin += [f"#PBS -l place={spec.place or 'scatter:excl'}"]
    begin += [f"#PBS -l walltime={write_time(parse_time(spec.time, '--time'))}"] if spec.time else []
    begin += [f"#PBS -q {spec.queue}"] if spec.queue else []
    begin += [f"#PBS -A {spec.project or spec.account}"] if spec.project or spec.account else []
    begin += [f"#PBS -J 1-{spec.repeats}"] if spec.repeats > 1 else []
    begin += ["#PBS -r y", "#PBS -j oe", f"#PBS -o {_directive(f'{job.folder}/logs/')}"]
    hosts = [
        "# The hosts of the allocation, each once, in their order; the first is this one.",
        'BERTRAIN_HOSTS="$job/hosts-${PBS_JOBID:?this script is run by PBS, or in place by bertrain launch pbs}"',
        'awk \'!seen[$1]++\' "$PBS_NODEFILE" > "$BERTRAIN_HOSTS"',
        "export BERTRAIN_HOSTS",
        "",
    ]
    start = _starts(['"$python" -u -m bertrain.launch ssh "$job" "$@"'], OVER_SSH)
    return begin, [*hosts, *start, *_timer(job)], PBS_REQUEUE.format(script=SCRIPT)


def _timer(job: Job) -> list[str]:
    """A warning of our own before `--time` is over, where nobody else sends one."""
    if not job.spec.time:
        return []
    seconds = parse_time(job.spec.time, "--time") - parse_time(job.spec.warning, "--warning")
    return [
        "",
        f"# Nobody else warns before the time ({job.spec.time}) is over: {job.spec.warning} before it, this does.",
        f'( trap \'kill "$!"; exit\' TERM; sleep {seconds} & wait "$!" && kill -s USR1 $$ ) &',
        "timer=$!",
    ]


NO_REQUEUE = """\
requeue() {
    echo "bertrain: stopped and saved; start it again with: bash $job/job.sh"
}
"""

SLURM_REQUEUE = """\
requeue() {
    if [ -n "${BERTRAIN_IN_PLACE:-}" ]; then
        echo "bertrain: stopped and saved; start it again with: bash $job/job.sh"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        note "requeued as job $SLURM_JOB_ID"
    else
        echo "bertrain: stopped and saved, but Slurm did not requeue it; submit it again with: sbatch $job/job.sh" >&2
    fi
}
"""

PBS_REQUEUE = """\
# Of an array, only the repeat that this one is.
submit_again() {{
    if [ "$repeat" -eq 0 ]; then
        qsub "$job/{script}"
    else
        sed '/^#PBS -J /d' "$job/{script}" | qsub -v "BERTRAIN_ONLY=$repeat" -
    fi
}}

requeue() {{
    if [ -n "${{BERTRAIN_IN_PLACE:-}}" ]; then
        echo "bertrain: stopped and saved; start it again with: bash $job/{script}"
    elif number=$(submit_again); then
        echo "$number" >> "$job/submitted"
        note "submitted again as $number"
    else
        echo "bertrain: stopped and saved, but PBS did not take it again; submit it with: qsub $job/{script}" >&2
    fi
}}
"""

END = """\
# --- the same for every launcher ---------------------------------------------------------------------------------

note() {
    printf '%s %s\\n' "$(date +%Y-%m-%dT%H:%M:%S%z)" "$*" >> "$out/events"
}

newest_checkpoint() {
    find "$run_here/checkpoints" -maxdepth 1 -name 'step-*' 2> /dev/null | sort | tail -n 1
}

# Each step is a process group of its own: Ctrl-C reaches this script, and the step through it, once.
set -m

# A signal is passed on to the step, whose ranks save and end; `wait` then has to be asked again.
step='' stopping='' woken=''
pass_on() {
    woken=$1 stopping=$1
    [ -z "$step" ] || kill -s "${passed_on_as:-$1}" "$step" 2> /dev/null
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

# Runs a step on every node and waits for it; its exit code is then in $code.
run_step() {
    number=$(find "$out/logs" -maxdepth 1 -name 'start-*' | wc -l)
    BERTRAIN_START=$(printf '%s/logs/start-%03d-%s' "$out" "$((number + 1))" "$1")
    export BERTRAIN_START
    if ! mkdir "$BERTRAIN_START"; then
        echo "bertrain: cannot write into $out/logs; make room there" >&2
        code=2
        return
    fi
    start_step "$1" < /dev/null &
    step=$!
    [ -z "$stopping" ] || pass_on "$stopping" # which came when there was no step yet
    wait "$step"
    code=$?
    while [ -n "$woken" ]; do
        woken=''
        wait "$step"
        ended=$?
        [ "$ended" -eq 127 ] || code=$ended
    done
    step=''
}

run_once() {
    number=${SLURM_JOB_ID:-${PBS_JOBID:-}}
    note "started on $(hostname) as process $$${number:+ of job $number}"
    in_vain=0 code=0
    [ -z "$preflight" ] || run_step preflight
    if [ "$code" -ne 0 ]; then
        note "the pre-flight ended with exit code $code"
        return
    fi
    code=75
    while [ -z "$stopping" ]; do
        before=$(newest_checkpoint)
        run_step training
        case $code in 0 | 2 | 75) break ;; esac
        [ -z "$stopping" ] || break
        if [ "$(newest_checkpoint)" = "$before" ]; then in_vain=$((in_vain + 1)); else in_vain=1; fi
        [ "$in_vain" -le "$restarts" ] || break
        again="exit code $code; starting all ranks again ($in_vain of $restarts without a new checkpoint)"
        note "$again"
        echo "bertrain: $again" >&2
        BERTRAIN_FAILED="$(date +%s) a rank failed"
        export BERTRAIN_FAILED
    done
    # Told to stop, it is to go on another day, whether all ranks came to save or not.
    case $stopping-$code in
        USR1-0 | USR1-2 | TERM-0 | TERM-2) ;;
        USR1-* | TERM-*) code=75 ;;
    esac
    note "ended with exit code $code"
}

for repeat in $repeats; do
    run_here=$run out=$job
    if [ "$repeat" -gt 0 ]; then
        export BERTRAIN_REPEAT=$repeat
        run_here=$run-$repeat out=$job/repeat-$repeat
    fi
    mkdir -p "$out/logs"
    run_once
    [ "$code" -eq 0 ] || break
done
[ -z "${timer:-}" ] || kill "$timer" 2> /dev/null
# Whoever sends TERM (a cancel, a preemption) decides what becomes of the job; after a warning, it is for us to ask.
[ "$code" -ne 75 ] || [ "$stopping" = TERM ] || requeue
exit "$code"
"""
