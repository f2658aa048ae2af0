# --- the same for every launcher ---------------------------------------------------------------------------------
# Exit codes: 0 done; 2 user error; 75 stopped and saved, to be continued; everything else is a failure.

note() { # appends a line to the events of this task
    printf '%s %s\n' "$(date +%Y-%m-%dT%H:%M:%S%z)" "$*" >> "$output/events"
}

requeue() {
    if [ -z "${submit:-}" ] || [ -n "${BERTRAIN_IN_PLACE:-}" ]; then
        echo "bertrain: stopped and saved; start it again with: bash $job/job.sh"
    elif ! submit_again; then
        echo "bertrain: stopped and saved, but not accepted again; submit it with: $submit $job/job.sh" >&2
    fi
}

saved_steps() { # the steps of the newest checkpoint of each of the task's runs, added up
    find "${folders[task]}" -maxdepth 4 -path '*/checkpoints/step-*' -prune -printf '%h\t%f\n' 2> /dev/null |
        awk -F '\t' '{ step = substr($2, 6) + 0; if (step > newest[$1]) newest[$1] = step }
                     END { for (run in newest) sum += newest[run]; print sum + 0 }'
}

# Each stage is a process group of its own: Ctrl-C reaches this script, which forwards it to the stage, once.
set -m

# Forwards a signal to the stage, whose ranks save and exit.
stage='' stopping=''
forward_signal() {
    stopping=$1
    [ -z "$stage" ] || kill -s "${forward_as:-$1}" "$stage" 2> /dev/null
}
trap 'forward_signal USR1' USR1
trap 'forward_signal TERM' TERM
trap 'forward_signal INT' INT
exec 9<> <(:) # a pipe that nobody writes to

# Runs a stage (preflight or task) on every node and waits for it; sets $code to its exit code.
run_stage() {
    number=$(find "$output/logs" -maxdepth 1 -name 'start-*' | wc -l)
    BERTRAIN_START=$(printf '%s/logs/start-%03d-%s' "$output" "$((number + 1))" "$1")
    export BERTRAIN_START
    if ! mkdir "$BERTRAIN_START"; then
        echo "bertrain: cannot write into $output/logs; free some space there" >&2
        code=2
        return
    fi
    start_stage "$1" < /dev/null &
    stage=$!
    # Asks the stage to save if this script is killed: the watcher then has another parent.
    (
        while read -r _ _ _ parent _ < "/proc/$BASHPID/stat" && [ "$parent" = $$ ]; do
            kill -0 "$stage" || exit
            sleep 1
        done
        kill -s "${forward_as:-TERM}" "$stage"
    ) > /dev/null 2>&1 &
    [ -z "$stopping" ] || forward_signal "$stopping" # received before the stage was started
    # Bash may notice a signal that comes just before `wait` only after it: so wait for half a second at most.
    while kill -0 "$stage" 2> /dev/null; do read -r -t 0.5 -u 9; done
    wait "$stage"
    code=$?
    stage=''
}

# Runs the pre-flight, then the task, restarted after failures; sets $code to its exit code.
run_task() {
    export BERTRAIN_TASK=$task BERTRAIN_FAILED=''
    number=${SLURM_JOB_ID:-${PBS_JOBID:-}}
    note "started on $(hostname) as process $$${number:+ of job $number}"
    code=0
    [ -z "$preflight" ] || run_stage preflight
    preflight=''
    if [ "$code" -ne 0 ]; then
        note "the pre-flight ended with exit code $code"
        return
    fi
    code=75 failures=0
    while [ -z "$stopping" ]; do
        before=$(saved_steps)
        run_stage task
        case $code in 0 | 2 | 75) break ;; esac
        [ -z "$stopping" ] || break
        if [ "$(saved_steps)" -gt "$before" ]; then failures=1; else failures=$((failures + 1)); fi
        [ "$failures" -le "$restarts" ] || break
        again="exit code $code; starting all ranks again ($failures of $restarts without a new checkpoint)"
        note "$again"
        echo "bertrain: $again" >&2
        BERTRAIN_FAILED="$(date +%s) a rank failed"
        export BERTRAIN_FAILED
    done
    # After USR1 or TERM the job is to be continued, even if some ranks could not save.
    case $stopping-$code in
        USR1-0 | USR1-2 | TERM-0 | TERM-2) ;;
        USR1-* | TERM-*) code=75 ;;
    esac
    note "ended with exit code $code"
}

for task in $tasks; do
    set_output
    mkdir -p "$output/logs"
    run_task
    [ "$code" -eq 0 ] || break
done
[ -z "${timer:-}" ] || kill "$timer" 2> /dev/null
# Requeue after a warning (USR1). After TERM (a cancel, a preemption) the sender decides what happens to the job.
[ "$code" -ne 75 ] || [ "$stopping" = TERM ] || requeue
exit "$code"
