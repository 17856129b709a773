"""A running ``sbcast``: the nodes work on what has arrived while the rest is on its way."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType

from ...system import processes
from . import slurm_faults

_GRACE = 5.0


class Sending:
    """One file on its way to the nodes of a step. Leaving the ``with`` block ends it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it.

        Args:
            argv: the command, see :func:`bundle.driver.transports.slurm_commands.broadcast_argv`.
            env: its whole environment.
        """
        # A file, as nobody reads while it runs and a pipe could fill.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process: processes.Process | None = None
        self._refused = ""
        try:
            self._process = processes.start(
                argv,
                env=env,
                stdin=processes.DEVNULL,
                stdout=processes.DEVNULL,
                stderr=self._errors,
            )
        except processes.ProcessError as exc:
            self._refused = exc.reason

    def __enter__(self) -> Sending:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            processes.stop(self._process, _GRACE)
        self._errors.close()

    @property
    def ended(self) -> bool:
        """True once it has ended, well or not."""
        return self._process is None or self._process.poll() is not None

    @property
    def failed(self) -> dict[str, str]:
        """The nodes that it did not reach, and why; ``""`` for what concerns no single node."""
        if self._process is None:
            return {"": self._refused}
        if not self._process.poll():
            return {}
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        faults = slurm_faults.broadcast_faults(errors)
        if faults:
            return faults
        lines = errors.strip().splitlines()
        return {"": lines[-1] if lines else "sbcast failed"}
