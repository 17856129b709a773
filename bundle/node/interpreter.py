"""The Python that environments on this node are made from."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import processes
from ..system.own_program import short_version

TIMEOUT_SECONDS = 10.0
_NOT_FOUND = 127  # exit status of a shell, or of a version manager's shim, that finds no program

_DESCRIBE = """\
import json, sys
print(json.dumps([
    "%d.%d.%d" % tuple(sys.version_info[:3]),
    sys.implementation.name,
    sys.abiflags,
    sys.base_prefix,
    getattr(sys, "_base_executable", sys.executable) or sys.executable,
]))
"""


class InterpreterFacts(NamedTuple):
    """An interpreter's description of itself."""

    version: str  # its full version, ``3.11.7``
    implementation: str
    abiflags: str  # ``t`` stands for free-threaded, which needs extension modules of its own
    base_prefix: str  # the directory of the installation behind it, or behind its environment
    base_executable: str

    def explain_misfit(self, version: str) -> str:
        """Return why it cannot be the base for ``major.minor``; empty if it can."""
        if self.implementation != "cpython":
            return f"{self.implementation} {self.version}"
        if self.version.rpartition(".")[0] != version:
            return self.version
        return f"{self.version} free-threaded" if "t" in self.abiflags else ""


def find_base_python(
    version: str, hints: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> str:
    """Return the base CPython of exactly this version, as an absolute path without links.

    Each candidate except the running one is run to find out what it is: a version manager's shim
    may start anything, and a virtual environment may be deleted while its installation stays.
    """
    env = os.environ if env is None else env
    refused: dict[str, str] = {}
    for candidate in _candidates(version, hints, env):  # lazily: a folder of PATH may be slow
        if candidate in refused:
            continue
        try:
            facts = describe_interpreter(candidate, env)
            if not (misfit := facts.explain_misfit(version)):
                return find_base_program(version, facts, env)
            refused[candidate] = misfit
        except processes.ProcessError as exc:
            refused[candidate] = describe_failure(exc)
    listed = "; ".join(f"{path}: {reason}" for path, reason in refused.items())
    values = {"version": version, "listed": listed or "no Python"}
    raise NodeError(Problem(ProblemCode.NO_CPYTHON, os.uname().nodename, values))


def describe_failure(failure: processes.ProcessError) -> str:
    """Return why a program failed: of a traceback the end, of a shim's words the beginning."""
    shim = failure.code == _NOT_FOUND
    return ": ".join([failure.reason, *(failure.lines[:1] if shim else failure.lines[-1:])])


def describe_interpreter(program: str, env: Mapping[str, str]) -> InterpreterFacts:
    """Return the description of an interpreter: of the running one at once, else by running it."""
    with contextlib.suppress(OSError):
        if sys.flags.isolated and os.path.samefile(program, "/proc/self/exe"):
            return InterpreterFacts(
                "%d.%d.%d" % sys.version_info[:3],
                sys.implementation.name,
                sys.abiflags,
                sys.base_prefix,
                getattr(sys, "_base_executable", sys.executable) or sys.executable,
            )
    argv = [program, "-I", "-S", "-c", _DESCRIBE]
    done = processes.run(argv, env=env, timeout=TIMEOUT_SECONDS)
    try:
        fields = [str(field) for field in json.loads(done.stdout.strip().splitlines()[-1])]
        return InterpreterFacts(*fields)
    except (ValueError, IndexError, TypeError) as exc:
        output = done.stdout + done.stderr
        raise processes.ProcessError(argv, 0, output, reason="is not a Python interpreter") from exc


def find_base_program(version: str, facts: InterpreterFacts, env: Mapping[str, str]) -> str:
    """Return the program of the installation behind an interpreter; ProcessError if none runs."""
    in_prefix = str(Path(facts.base_prefix, "bin", f"python{version}"))
    failure = ""
    for path in map(os.path.realpath, (in_prefix, facts.base_executable)):
        folder = Path(path).parent
        # The program may be in a virtual environment that copies Python.
        if (folder / "pyvenv.cfg").exists() or (folder.parent / "pyvenv.cfg").exists():
            continue
        try:
            if not describe_interpreter(path, env).explain_misfit(version):
                return path
        except processes.ProcessError as exc:
            failure = failure or exc.reason
    reason = f"its installation in {facts.base_prefix} has no program of its own that runs"
    raise processes.ProcessError([in_prefix], None, failure, reason=reason)


def _candidates(version: str, hints: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    if sys.executable and short_version() == version:
        yield sys.executable
    path = env.get("PATH", os.defpath)
    for hint in hints:
        yield shutil.which(hint, path=path) or hint
    folders = [folder for folder in path.split(os.pathsep) if folder.startswith("/")]
    folders += ["/usr/local/bin", "/usr/bin", *sorted(map(str, Path("/opt").glob("python*/bin")))]
    for name in (f"python{version}", "python3", "python"):
        found = (shutil.which(name, path=folder) for folder in folders)
        yield from filter(None, found)
