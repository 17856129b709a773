"""Transports, by which the driver reaches the nodes: local processes, or Slurm's ``srun``."""
