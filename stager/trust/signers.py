"""The file with the keys that may sign: read once, and refused where others could change it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from ..core.errors import ConfigError
from ..core.files import opened

MOST_BYTES = 1 << 16
"""Length of the file: it travels to every node."""


def read_signers(path: Path) -> str:
    """Return the content of an ``allowed_signers`` file.

    Raises:
        ConfigError: it cannot be read, is too long, or somebody else may write it.
    """
    setting = f"trust.allowed-signers: {path}"
    try:
        _refuse_open_folder(path.parent, setting)
        with opened(path) as handle:
            _refuse_writable(os.fstat(handle.fileno()), path, setting)
            text = handle.read(MOST_BYTES + 1).decode("utf-8")
    except OSError as exc:
        raise ConfigError(
            f"{setting} cannot be read: {exc.strerror or exc}",
            hint="name the file with the keys that may sign; its form is in ssh-keygen(1), "
            "ALLOWED SIGNERS",
        ) from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{setting} is not a text", hint="ssh-keygen(1) has its form") from exc
    if len(text.encode()) > MOST_BYTES:
        raise ConfigError(
            f"{setting} has more than {MOST_BYTES >> 10} KiB",
            hint="let one key certify the others: a line with cert-authority, see ssh-keygen(1)",
        )
    return text


def _refuse_writable(status: os.stat_result, path: Path, setting: str) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{setting} belongs to another user, who may change it",
            hint="use a copy of your own, or one of root's",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{setting} may be changed by others: its mode is {stat.S_IMODE(status.st_mode):04o}",
            hint=f"chmod go-w {path}",
        )


def _refuse_open_folder(folder: Path, setting: str) -> None:
    """Refuse a file that others could replace; a sticky folder lets only its owners do so."""
    status = folder.stat()
    if status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH:
        who, bit = "anyone", "o-w"
    elif status.st_mode & stat.S_IWGRP and not _has_nobody_else(status.st_gid):
        who, bit = "a group", "g-w"
    else:
        return
    raise ConfigError(
        f"{setting} is in a folder in which {who} can replace it",
        hint=f"chmod {bit} {folder}, or use a copy elsewhere",
    )


def _has_nobody_else(gid: int) -> bool:
    """Return whether a group is root's or user-private: there the umask is often 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return gid == 0
    own = (user.pw_gid, user.pw_name) == (gid, group.gr_name)
    return gid == 0 or (own and set(group.gr_mem) <= {user.pw_name})
