"""Slurm as text: what is requested of it, its messages, and the batch script."""
