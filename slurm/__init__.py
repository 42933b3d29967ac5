"""The batch script of a Slurm job and its helpers."""
