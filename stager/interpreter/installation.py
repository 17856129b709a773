"""A Python of this machine that a bundle can bring: named by the user, or found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bundle.node import interpreter
from bundle.protocol.problem import NodeError
from bundle.system.processes import ProcessError

from ..config.sections import BUNDLED
from ..core import elf
from ..core.errors import ConfigError, StagerError
from ..core.files import expanded
from ..core.processes import Runner, run
from ..core.values import Target
from ..lock import uv

_KEY = "environment.interpreter"
_SYSTEM = (Path("/usr"), Path("/"))
"""Folders that a distribution's Python shares with everything else."""
_UV_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A CPython of this machine."""

    prefix: Path
    """Its folder, without links."""
    program: str
    """The path of its program in it."""
    version: str
    """Its full version, ``3.12.1``."""

    @property
    def library(self) -> str:
        """Return the path of its standard library in the folder."""
        return f"lib/python{self.version.rpartition('.')[0]}"


class _UnusableError(ValueError):
    """A Python that a bundle cannot bring; the text says why, after its path."""


def find(
    setting: str, target: Target, env: Mapping[str, str] = os.environ, run: Runner = run
) -> Installation:
    """Return the Python that a bundle is to bring.

    Raises:
        ConfigError: there is none that fits.
    """
    host = Target.of_host()
    if (target.machine, target.libc[0]) != (host.machine, host.libc[0]):
        raise ConfigError(
            f"{_KEY}: the Python of this machine is for {host.machine} with {host.libc[0]}, and "
            f"the environment is for {target.machine} with {target.libc[0]}",
            hint="build on a machine of the nodes' kind, or leave the interpreter to the nodes",
        )
    if setting == BUNDLED:
        return _found(target, env, run)
    path = Path(setting)
    try:
        return _installation(_program_in(path, target), target, env)
    except _UnusableError as exc:
        raise ConfigError(f"{_KEY}: {path} {exc}", hint=_advice(target)) from exc


def _found(target: Target, env: Mapping[str, str], run: Runner) -> Installation:
    """Return the first Python of the target's version that can be moved."""
    refused: dict[str, str] = {}
    for path in candidates(target, env, run):
        try:
            return _installation(path, target, env)
        except _UnusableError as exc:
            refused.setdefault(str(path), f"{path} {exc}")
    raise ConfigError(
        f"{_KEY}: there is no Python {target.python} here that a bundle can bring",
        hint=_advice(target),
        context=list(refused.values()),
    )


def _advice(target: Target) -> str:
    return (
        f"uv has Pythons that can be moved: uv python install {target.python}, then "
        f'{_KEY} = "{BUNDLED}"; or name the folder of one that pyenv (`pyenv prefix`) or conda '
        "has made"
    )


def candidates(target: Target, env: Mapping[str, str], run: Runner) -> Iterator[Path]:
    """Yield the programs of the target's version: uv's, pyenv's, and the one that runs this."""
    program = f"bin/python{target.python}"
    kept = _uv_folder(run)
    if kept is not None:
        yield from _newest_first(kept, f"cpython-{target.python}.*", program)
    pyenv = Path(env.get("PYENV_ROOT") or expanded("~/.pyenv"))
    yield from _newest_first(pyenv / "versions", f"{target.python}.*", program)
    if target.is_host_python:
        with suppress(NodeError):  # this one is free-threaded, or no CPython
            yield Path(interpreter.find(target.python, (), env))


def _newest_first(folder: Path, pattern: str, program: str) -> list[Path]:
    found = [path / program for path in folder.glob(pattern) if not path.is_symlink()]
    return sorted(filter(Path.is_file, found), key=_patch, reverse=True)


def _patch(program: Path) -> tuple[int, int, str]:
    """Return what orders the Pythons of a version by the names of their folders, the best last.

    The last number of the version counts first. Then the shorter name does: uv's are longer for
    builds that need newer processors (``x86_64_v3`` for ``x86_64``), for musl, and for debugging.
    """
    name = program.parents[1].name
    digits = name.removeprefix("cpython-").split(".")[2:3]
    number = "".join(digits).partition("-")[0].partition("+")[0]
    return int(number) if number.isdigit() else -1, -len(name), name


def _uv_folder(run: Runner) -> Path | None:
    command = uv.command()
    if command is None:
        return None
    try:
        return Path(run([*command, "python", "dir"], timeout=_UV_SECONDS).stdout.strip())
    except StagerError:
        return None


def _program_in(path: Path, target: Target) -> Path:
    """Return the program that a path means: itself, or in the folder of an installation."""
    program = f"python{target.python}"
    if path.is_dir():
        for found in (path / "bin" / program, path / program):
            if found.is_file():
                return found
        raise _UnusableError(
            f"has no Python {target.python}: there is no file {path / 'bin' / program}"
        )
    if path.is_symlink() and not path.exists():
        raise _UnusableError(f"is a link to {path.readlink()}, which is not there")
    if not path.is_file():
        raise _UnusableError("is not there")
    return path


def _installation(path: Path, target: Target, env: Mapping[str, str]) -> Installation:
    """Return the installation of a program; a virtual environment's is its base."""
    _refuse_other_machine(path, target)
    try:
        facts = interpreter.ask(str(path), env)
        misfit = facts.misfit(target.python)
        if misfit:
            raise _UnusableError(f"is {misfit}; environment.python asks for {target.python}")
        program = Path(interpreter.base(target.python, facts, env))
    except ProcessError as exc:
        raise _UnusableError(f"does not work: {interpreter.cause_of(exc)}") from exc
    prefix = Path(facts.base_prefix).resolve()
    if prefix in _SYSTEM:
        raise _UnusableError(
            f"belongs to the system in {prefix}, which cannot be moved: its files lie among those "
            "of all other programs"
        )
    made = Installation(prefix=prefix, program=f"bin/{program.name}", version=facts.version)
    for part in (made.program, f"{made.library}/os.py", f"{made.library}/encodings"):
        if not (prefix / part).exists():
            raise _UnusableError(f"is not relocatable: {prefix} has no {part}")
    if not program.samefile(prefix / made.program):
        raise _UnusableError(f"is not relocatable: {program} does not lie in {prefix}")
    return made


def _refuse_other_machine(path: Path, target: Target) -> None:
    """Refuse a program for another processor, even if this machine could emulate that."""
    try:
        header = elf.read(path)
    except OSError as exc:
        raise _UnusableError(f"cannot be read: {exc.strerror}") from exc
    if header is not None and header.machine != target.machine:
        machine = header.machine or "another processor"
        raise _UnusableError(f"is for {machine}; this machine is {target.machine}")
