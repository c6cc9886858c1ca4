#!/bin/bash
# sbatch examples/slurm.sh
#
# `fullshard launch --num_machines 2 --num_processes 16 --device cuda --print slurm train.py` writes such a file for your
# script; here the job also saves before its time limit and queues itself again, to go on.
#SBATCH --job-name=fullshard-example
#SBATCH --nodes=2
# One task per host: the launcher starts the processes of its host itself.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.log
# SIGUSR1 to all processes two minutes before the limit: they save together and end with exit code 75.
#SBATCH --signal=USR1@120
#SBATCH --requeue
set -uo pipefail

# srun no longer takes the count of processors from the lines above (Slurm 22.05).
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    fullshard launch --grace_period 110 examples/resume.py --steps "${STEPS:-100000}"
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
