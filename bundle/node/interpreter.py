"""The Python that environments on this node are made from."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..protocol.problem import NodeError, Problem
from ..system import processes

TIMEOUT_SECONDS = 10.0

_ASK = """\
import json, sys
print(json.dumps([
    "%d.%d.%d" % tuple(sys.version_info[:3]),
    sys.implementation.name,
    sys.abiflags,
    sys.base_prefix,
    getattr(sys, "_base_executable", sys.executable) or sys.executable,
]))
"""


@dataclass(frozen=True)
class Answer:
    """What an interpreter says about itself."""

    version: str
    """Its full version, ``3.11.7``."""
    implementation: str
    """``cpython``, ``pypy``, ..."""
    abiflags: str
    """``t`` stands for free-threaded, whose extension modules are different ones."""
    base_prefix: str
    """Where the installation is that it, or its virtual environment, belongs to."""
    base_executable: str
    """What it takes for the program of that installation."""

    def misfit(self, version: str) -> str:
        """Why it cannot be the base of an environment for ``major.minor``; empty if it can."""
        if self.implementation != "cpython":
            return f"{self.implementation} {self.version}"
        if self.version.rpartition(".")[0] != version:
            return self.version
        return f"{self.version} free-threaded" if "t" in self.abiflags else ""


def find(version: str, hints: Sequence[str] = (), env: Mapping[str, str] | None = None) -> str:
    """The base CPython of exactly this version, as an absolute path without links.

    Looked at in order: the installation of the running interpreter, the hints, ``pythonX.Y``,
    ``python3`` and ``python`` on PATH, then the usual directories. Each but the running one is run
    to find out what it really is: a version manager's shim may start anything or nothing, and a
    virtual environment may be deleted while the installation behind it stays.

    Args:
        version: ``major.minor``.
        hints: programs to try first, as paths or as names on PATH.
        env: the variables to run them with and to take PATH from; None for this process's.

    Raises:
        NodeError: none fits; every candidate is listed with what it turned out to be.
    """
    env = os.environ if env is None else env
    seen: dict[str, str] = {}
    for candidate in _candidates(version, hints, env):
        if candidate in seen:
            continue
        try:
            answer = ask(candidate, env)
            seen[candidate] = answer.misfit(version)
            if not seen[candidate]:
                return _base(version, answer, env)
        except processes.ProcessError as exc:
            seen[candidate] = " ".join([exc.reason, *exc.tail[-1:]])
    raise NodeError(
        Problem(
            what=f"there is no CPython {version}, which the bundle was built for",
            where=os.uname().nodename,
            why="found " + ("; ".join(f"{path}: {seen[path]}" for path in seen) or "no Python"),
            fix=f"put python{version} on PATH on every node (module load, pyenv or conda), or build"
            " for the nodes' version with [environment] python in stager.toml",
        )
    )


def ask(program: str, env: Mapping[str, str]) -> Answer:
    """Run an interpreter and let it say what it is; the one that runs here says so at once.

    Raises:
        process.ProcessError: it does not start, fails, takes too long, or says something else.
    """
    if _runs_here(program):
        return _own()
    argv = [program, "-I", "-S", "-c", _ASK]
    done = processes.run(argv, env=env, timeout=TIMEOUT_SECONDS)
    try:
        fields = [str(field) for field in json.loads(done.stdout.strip().splitlines()[-1])]
        return Answer(*fields)
    except (ValueError, IndexError, TypeError) as exc:
        output = done.stdout + done.stderr
        raise processes.ProcessError(argv, 0, output, reason="is not a Python interpreter") from exc


def _runs_here(program: str) -> bool:
    """Whether this process is that program, links resolved, and was started as it would be."""
    try:
        return bool(sys.flags.isolated) and os.path.samefile(program, "/proc/self/exe")
    except OSError:
        return False


def _own() -> Answer:
    return Answer(
        "%d.%d.%d" % sys.version_info[:3],
        sys.implementation.name,
        sys.abiflags,
        sys.base_prefix,
        getattr(sys, "_base_executable", sys.executable) or sys.executable,
    )


def _base(version: str, answer: Answer, env: Mapping[str, str]) -> str:
    """The program of the installation behind an interpreter, proved to run by itself.

    The prefix is tried before ``sys._base_executable``, which before Python 3.11 names the virtual
    environment's own program on Linux.
    """
    in_prefix = Path(answer.base_prefix, "bin", f"python{version}")
    failure = None
    for path in [str(in_prefix), answer.base_executable]:
        real = os.path.realpath(path)
        if _in_environment(real):
            continue
        try:
            if not ask(real, env).misfit(version):
                return real
        except processes.ProcessError as exc:
            failure = failure or exc
    reason = f"its installation in {answer.base_prefix} has no program of its own that runs"
    tail = failure.reason if failure else ""
    raise processes.ProcessError([str(in_prefix)], None, tail, reason=reason)


def _in_environment(program: str) -> bool:
    """Whether a program lies in a virtual environment (a copy, as links have been resolved)."""
    folder = Path(program).parent
    return (folder / "pyvenv.cfg").exists() or (folder.parent / "pyvenv.cfg").exists()


def _candidates(version: str, hints: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """Programs to try, as absolute paths; the same one may come more than once."""
    if sys.executable and sys.version_info[:2] == tuple(int(part) for part in version.split(".")):
        yield sys.executable
    path = env.get("PATH", os.defpath)
    for hint in hints:
        yield shutil.which(hint, path=path) or hint
    folders = [folder for folder in path.split(os.pathsep) if folder.startswith("/")]
    folders += ["/usr/local/bin", "/usr/bin"]
    folders += sorted(str(found) for found in Path("/opt").glob("python*/bin"))
    for name in (f"python{version}", "python3", "python"):
        for folder in folders:
            found = shutil.which(name, path=folder)
            if found:
                yield found
