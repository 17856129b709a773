"""``[trust]``: whose signature a bundle must have before anything of it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import checks
from .table import Table


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    """``[trust]``: whose signature a bundle must have before anything of it runs."""

    allowed_signers: Path | None = None
    """The file with the keys that may sign, as ``ssh-keygen(1)`` describes it; None for none."""
    require: bool = False
    """True to refuse a bundle that none of them has signed."""


def trust(table: Table, root: Path) -> TrustConfig:
    """Read the table; problems are noted in it."""
    config = TrustConfig(
        allowed_signers=table.take(
            "allowed-signers", None, checks.path(root), "a path, as of an allowed_signers file"
        ),
        require=table.take("require", False, checks.boolean, "true or false"),
    )
    if config.require and config.allowed_signers is None and not table.has("allowed-signers"):
        table.problem("require", "true needs allowed-signers, the file with the keys that may sign")
    return config
