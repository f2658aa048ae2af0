submit="qsub"
# Submits this script again; of a job array only the task that was stopped.
submit_again() {
    if [ -z "${PBS_ARRAY_INDEX:-${BERTRAIN_ONLY:-}}" ]; then
        number=$(qsub "$job/job.sh")
    else
        number=$(sed '/^#PBS -J /d' "$job/job.sh" | qsub -v "BERTRAIN_ONLY=$task" -)
    fi && echo "$number" >> "$job/submitted" && note "submitted again as $number"
}
