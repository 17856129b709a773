"""OpenSSH's ``ssh-keygen``, as this side starts it."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from bundle.checks.signature import KEYGEN, NAMESPACE, REFUSED, SECONDS, as_path, statement
from bundle.system.processes import CompletedCommand

from ..core.errors import StagerError
from ..core.processes import CommandError, feed, stream

_LOCKED = "incorrect passphrase"
"""What it says of a key whose passphrase nobody has typed."""
_TOUCH = re.compile(r"user presence", re.IGNORECASE)
"""What it says of a hardware key that is to be touched."""
OLDEST = "OpenSSH 8.2"
"""The first version with all that is used."""


def run(argv: Sequence[str], text: str) -> CompletedCommand:
    """Run a command that reads a text, to its end.

    Raises:
        StagerError: it cannot be started, is too old, or takes too long.
    """
    try:
        return feed(argv, text, environment=os.environ, timeout=SECONDS)
    except CommandError as exc:
        if exc.completed.returncode == REFUSED:
            return exc.completed
        slow = exc.completed.returncode == -signal.SIGKILL  # at the end of its time
        raise StagerError(
            f"{exc.message.splitlines()[0]}: it cannot check signatures",
            hint="see what keeps this machine busy, and run the command again"
            if slow
            else f"install {OLDEST} or newer",
            context=exc.context,
        ) from exc


def signing_key(signature: str, bundle_id: str) -> CompletedCommand:
    """Let it say which key has signed a bundle; whose that is, is not looked at."""
    with as_path(signature) as path:
        argv = [KEYGEN, "-Y", "check-novalidate", "-n", NAMESPACE, "-s", path]
        return run(argv, statement(bundle_id))


def principals(signature: str, signers: str) -> CompletedCommand:
    """Let it find whose key has made a signature."""
    with as_path(signature) as path, as_path(signers) as allowed:
        return run([KEYGEN, "-Y", "find-principals", "-s", path, "-f", allowed], "")


def make_signature(key: Path, text: Path, say: Callable[[str], None]) -> None:
    """Let it write the signature of a file beside that, with ``.sig`` behind the name.

    It may ask for a passphrase on the terminal, or for a touch of a hardware key.

    Args:
        key: the private key; or the public one, of a key that an agent holds.
        text: the file that is signed.
        say: called with each line that it says; of a failure, only with requests for a touch.

    Raises:
        StagerError: it cannot be started, or did not sign.
    """
    lines: list[str] = []

    def take(line: str) -> None:
        if _TOUCH.search(line):
            say(line)
        else:
            lines.append(line)

    argv = [KEYGEN, "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(text)]
    ended = stream(argv, take, on_talk=take)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.returncode:
        raise _not_signed(key, lines)
    for line in lines:
        say(line)


def _not_signed(key: Path, lines: Sequence[str]) -> StagerError:
    last = lines[-1] if lines else "it did not say why"
    if _LOCKED in last and not _has_terminal():
        word = shlex.quote(str(key))
        return StagerError(
            f"{key} has a passphrase, and there is no terminal to ask for it",
            hint=f"`ssh-add {word}` in a terminal, then --key {word}.pub",
        )
    return StagerError(
        f"{KEYGEN} could not sign with {key}: {last}",
        hint="name a private key, or the public key (.pub) of one that your ssh-agent holds",
        context=lines[:-1],
    )


def _has_terminal() -> bool:
    """Return whether ``ssh-keygen`` could ask: it uses ``/dev/tty``, not its standard input."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
