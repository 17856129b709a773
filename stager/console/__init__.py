"""Everything a person sees: talk on standard error, data on standard output."""

from __future__ import annotations

from .job_result import Console

__all__ = ["Console"]
