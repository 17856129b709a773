"""The training loop and its parts: synchronisation, checkpoints, stopping."""
