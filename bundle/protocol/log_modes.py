"""Readers of a job's files: its user alone, or also the group of the log directory."""

from __future__ import annotations

PRIVATE, GROUP = "private", "group"
MODES = (PRIVATE, GROUP)
"""The values of ``cluster.log-mode``."""
