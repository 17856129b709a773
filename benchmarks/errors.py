"""The expected failures of a benchmark, as one kind of exception."""

from __future__ import annotations


class BenchError(Exception):
    """Something expected is wrong: what, where, why, and what to do about it."""

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        """Keep the parts; those that are empty are not shown."""
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        """One line for each part that is there."""
        lines = [f"error: {self.what}"]
        lines += [f"  where: {self.where}"] if self.where else []
        lines += [f"  why: {self.why}"] if self.why else []
        lines += [f"  fix: {self.fix}"] if self.fix else []
        return "\n".join(lines)
