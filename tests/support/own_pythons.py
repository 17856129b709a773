"""Pythons of this machine that a bundle can bring, and what else such a bundle needs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from stager.core.errors import ConfigError
from stager.core.values import Target
from stager.interpreter import find_interpreter
from tests.support.building import HOST
from tests.support.interpreters import other_pythons
from tests.support.needs import lacks


class OwnPython(NamedTuple):
    """A Python of another version than the one that runs the tests."""

    target: Target
    prefix: Path

    @property
    def program(self) -> Path:
        return self.prefix / "bin" / f"python{self.target.python}"


def movable_pythons() -> list[OwnPython]:
    """Those of other versions that a bundle can bring, the newest last."""
    found = []
    for path in other_pythons():
        target = Target(python=path.rpartition("python")[2], platform=HOST.platform)
        with contextlib.suppress(ConfigError):
            found.append(OwnPython(target, find_interpreter(path, target).prefix))
    return found


def movable_python() -> OwnPython:
    """The newest that has a decompressor of its own; the test is skipped without one."""
    usable = [own for own in movable_pythons() if _minor(own) < 14]
    if not usable:
        lacks("movable python", "there is none here")
    preferred = [own for own in usable if own.target.python == "3.12"]
    return (preferred or usable)[-1]


def oldest_python(other_than: OwnPython) -> OwnPython:
    """The oldest one, for nodes that have nothing newer; the test is skipped without one."""
    usable = [own for own in movable_pythons() if _minor(own) < _minor(other_than)]
    if not usable:
        lacks("movable python", f"there is none older than {other_than.target.python}")
    return usable[0]


def _minor(own: OwnPython) -> int:
    return int(own.target.python.partition(".")[2])
