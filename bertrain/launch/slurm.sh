submit="sbatch"
submit_again() {
    scontrol requeue "$SLURM_JOB_ID" && note "requeued as job $SLURM_JOB_ID"
}
