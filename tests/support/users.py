"""Commands as other users: what the owner of a file may, another one may not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support.needs import lacks, needs

GROUP = 52341  # a group that the users of a test share
_READ = "-all,+dac_read_search"  # the interpreter may lie in root's home; writing is as ever


def as_user(user: int, argv: Sequence[str], *, group: int = GROUP) -> list[str]:
    """A command as another user would run it; the test is skipped where that cannot be done."""
    needs("root")
    prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={group}"]
    prefix += [f"--inh-caps={_READ}", f"--ambient-caps={_READ}", "--"]
    try:
        subprocess.run([*prefix, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        lacks("root", f"commands cannot be run as another user: {exc}")
    return [*prefix, *argv]


@contextmanager
def umask(value: int) -> Iterator[None]:
    """With another umask of this process."""
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)
