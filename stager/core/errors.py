"""The errors that the tool raises on purpose; ``cli.application`` makes exit codes of them."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence

from bundle.protocol import enumerations
from bundle.protocol.dataclass import dataclass

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_JOB = enumerations.EXIT_JOB
EXIT_INTERRUPTED = enumerations.EXIT_INTERRUPTED
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)  # a full disk, or no terminal


class StagerError(Exception):
    """An expected failure: what went wrong, what to do, and supporting lines; without secrets."""

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, *, hint: str = "", context: Sequence[str] = ()) -> None:
        from bundle.redaction.secrets import strip_url_secrets  # not before: `--help` has no use

        self.message = strip_url_secrets(message)
        super().__init__(self.message)
        self.hint = strip_url_secrets(hint)
        self.context = tuple(map(strip_url_secrets, context))


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
class CommandFailure:
    """The result of a command that failed."""

    ok: bool = False
    error: Mapping[str, object]

    @classmethod
    def from_error(cls, failure: StagerError) -> CommandFailure:
        """Return the result of a command that an error ended."""
        texts = {"message": failure.message, "hint": failure.hint, "context": failure.context}
        return cls(error=texts)


# --- Making foreign text safe to print: what would make a terminal or a reader's eye do more than
# read is written out as an escape, in a pipe as on a terminal. Files keep every byte.

_COLOUR = re.compile(r"(?:\x1b\[|\x9b)[0-9;:]*m")
TURNING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of the text around them (Unicode's ``Bidi_Control``)."""
_TURNING = "".join(map(chr, TURNING))
_UNSEEN = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_TURNING}\u2028\u2029\ud800-\udfff]")
"""Control characters but for tabs and line feeds; those of Unicode that end a line or turn it."""


def escape_invisible(text: str) -> str:
    r"""Return a text without colours, with other invisible characters written as ``\x1b``."""
    text = text.removesuffix("\r")
    if _UNSEEN.search(text) is None:
        return text
    shown = _COLOUR.sub("", text)
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), shown)


def apply_carriage_returns(line: str) -> str:
    """Return what a terminal shows of a line in the end: a progress bar is its last state."""
    return line.removesuffix("\r").rpartition("\r")[2]


def escape_line_feeds(text: str) -> str:
    r"""Escape what is invisible, and line feeds, too, as ``\n``: for names of files."""
    return escape_invisible(text).replace("\n", r"\n")


def format_result(result: object) -> str:
    """Return a command's result as JSON for scripts; its escapes keep a terminal safe."""
    import json

    from bundle.protocol.codec import encode  # not before: `--help` has no use for either

    text = json.dumps({"schema": 1, **encode(result)}, indent=2, ensure_ascii=True)
    return text.replace("\x7f", "\\u007f") + "\n"
