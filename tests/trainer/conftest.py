"""Modules of the trainer that run only once PyTorch is there import it, and so do their tests."""

import importlib.util

collect_ignore_glob = (
    [] if importlib.util.find_spec("torch") else ["data/*", "engine/*", "workloads/*"]
)
