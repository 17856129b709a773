"""Strays: paths in an environment that no listing has, as programs leave them."""

from __future__ import annotations

import os
import stat

from .interpreter_link import RENEWED

_UNGUARDED = ("project", "assets")
"""Directories in which programs may leave files of their own."""


def is_directory(path: str) -> bool:
    """Return True for a directory, but not for a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def strays(env_dir: str, other: str) -> list[str]:
    """Return the files that programs have left in an environment and that another copy lacks."""
    strays = []
    pending = list(_UNGUARDED)
    while pending:
        folder = pending.pop()
        for name in _names(os.path.join(env_dir, folder)):
            path = f"{folder}/{name}"
            counterpart = os.path.join(other, path)
            if not os.path.lexists(counterpart):
                strays.append(path)
            elif is_directory(counterpart):
                pending.append(path)
    return strays


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder) if is_directory(folder) else []
    except OSError:
        return []


def may_stay(path: str) -> bool:
    """Return True for a stray that is harmless: bytecode of Python, or a file of the user's."""
    *folders, name = path.split("/")
    if name == "__pycache__":
        return True
    if folders[-1:] == ["__pycache__"] and ".pyc" in name:
        return True
    if folders and folders[0] in _UNGUARDED:
        return True
    return RENEWED.fullmatch(path) is not None
