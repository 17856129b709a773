"""The errors that the tool raises on purpose, a single family.

An expected failure says what went wrong, where, and what to do about it. Only the command line
boundary (``stager.cli.program``) turns one into an exit code; nothing else in the tool exits.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from bundle.protocol import enumerations
from bundle.redaction.secrets import without_url_secrets

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_JOB = enumerations.EXIT_JOB
EXIT_INTERRUPTED = enumerations.EXIT_INTERRUPTED
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""Errors of a stream that goes to a full disk, or to a terminal that is gone."""


class StagerError(Exception):
    """An expected failure; a URL in its texts is shown without its credentials.

    Attributes:
        message: what went wrong, and where, in one sentence.
        hint: what the user can do about it; empty when there is nothing to add.
        context: supporting lines (offending packages, the last lines of a tool's output).
        exit_code: what the process returns, see the exit codes above.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, *, hint: str = "", context: Sequence[str] = ()) -> None:
        self.message = without_url_secrets(message)
        super().__init__(self.message)
        self.hint = without_url_secrets(hint)
        self.context = tuple(map(without_url_secrets, context))


class ConfigError(StagerError):
    """A value in ``stager.toml``, or on the command line, that cannot be used."""


class ResolveError(StagerError):
    """The requirements could not be turned into a lock."""


class WheelError(StagerError):
    """A wheel that cannot be trusted or used."""


class BundleError(StagerError):
    """A bundle that is damaged, or is not for this machine."""


class SpaceError(StagerError):
    """Not enough space, or not enough inodes, in a directory to be written to."""


class JobError(StagerError):
    """A node or a rank failed; ``context`` has the details."""

    exit_code = EXIT_JOB


@dataclass(frozen=True, kw_only=True)
class ErrorTexts:
    """The texts of an expected failure."""

    message: str
    """What went wrong, and where."""
    hint: str
    """What the user can do about it."""
    context: tuple[str, ...]
    """Supporting lines."""


@dataclass(frozen=True, kw_only=True)
class CommandFailure:
    """The result of a command that failed."""

    ok: bool = False
    """False."""
    error: ErrorTexts
    """The reason."""

    @classmethod
    def of(cls, failure: StagerError) -> CommandFailure:
        """Return the result of a command that an error ended."""
        texts = ErrorTexts(message=failure.message, hint=failure.hint, context=failure.context)
        return cls(error=texts)
