"""The Python that environments on this node are made from."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import processes
from ..system.own_program import short_version

TIMEOUT_SECONDS = 10.0
_NOT_FOUND = 127
"""Exit status of a shell, or of a version manager's shim, that finds no such program."""

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


@dataclass(frozen=True)
class InterpreterFacts:
    """An interpreter's description of itself."""

    version: str
    """Its full version, ``3.11.7``."""
    implementation: str
    abiflags: str
    """``t`` stands for free-threaded, which needs extension modules of its own."""
    base_prefix: str
    """The directory of the installation that it, or its virtual environment, belongs to."""
    base_executable: str
    """The program of that installation, as far as it knows."""

    def explain_misfit(self, version: str) -> str:
        """Return why it cannot be the base for ``major.minor``; empty if it can."""
        if self.implementation != "cpython":
            return f"{self.implementation} {self.version}"
        if self.version.rpartition(".")[0] != version:
            return self.version
        if "t" in self.abiflags:
            return f"{self.version} free-threaded"
        return ""


def find_base_python(
    version: str, hints: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> str:
    """Return the base CPython of exactly this version, as an absolute path without links.

    Tried in order: the installation of the running interpreter, the hints, ``pythonX.Y``,
    ``python3`` and ``python`` on PATH, then the usual directories. Each except the running one is
    run to find out what it really is: a version manager's shim may start anything or nothing, and a
    virtual environment may be deleted while the installation behind it stays.
    """
    env = os.environ if env is None else env
    refused: dict[str, str] = {}
    for candidate in _candidates(version, hints, env):
        if candidate in refused:
            continue
        try:
            answer = describe_interpreter(candidate, env)
            misfit = answer.explain_misfit(version)
            if not misfit:
                return find_base_of(version, answer, env)
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
    """Return the description of an interpreter: of the running one at once, else by running it.

    Raises:
        processes.ProcessError: it does not start, fails, takes too long, or prints something else.
    """
    if _is_running(program):
        return _describe_running_interpreter()
    argv = [program, "-I", "-S", "-c", _DESCRIBE]
    done = processes.run(argv, env=env, timeout=TIMEOUT_SECONDS)
    try:
        fields = [str(field) for field in json.loads(done.stdout.strip().splitlines()[-1])]
        return InterpreterFacts(*fields)
    except (ValueError, IndexError, TypeError) as exc:
        output = done.stdout + done.stderr
        raise processes.ProcessError(argv, 0, output, reason="is not a Python interpreter") from exc


def _is_running(program: str) -> bool:
    """Tell whether it is this interpreter, links resolved, and isolated."""
    try:
        return bool(sys.flags.isolated) and os.path.samefile(program, "/proc/self/exe")
    except OSError:
        return False


def _describe_running_interpreter() -> InterpreterFacts:
    return InterpreterFacts(
        "%d.%d.%d" % sys.version_info[:3],
        sys.implementation.name,
        sys.abiflags,
        sys.base_prefix,
        getattr(sys, "_base_executable", sys.executable) or sys.executable,
    )


def find_base_of(version: str, answer: InterpreterFacts, env: Mapping[str, str]) -> str:
    """Return the program of the installation behind an interpreter, which must run by itself.

    The prefix is tried before ``sys._base_executable``, which before Python 3.11 names the virtual
    environment's own program on Linux.

    Raises:
        processes.ProcessError: there is none.
    """
    in_prefix = Path(answer.base_prefix, "bin", f"python{version}")
    failure = None
    for path in [str(in_prefix), answer.base_executable]:
        real = os.path.realpath(path)
        if _is_in_environment(real):
            continue
        try:
            if not describe_interpreter(real, env).explain_misfit(version):
                return real
        except processes.ProcessError as exc:
            failure = failure or exc
    reason = f"its installation in {answer.base_prefix} has no program of its own that runs"
    tail = failure.reason if failure else ""
    raise processes.ProcessError([str(in_prefix)], None, tail, reason=reason)


def _is_in_environment(program: str) -> bool:
    """Tell whether it is in a virtual environment that copies Python; links are resolved."""
    folder = Path(program).parent
    return (folder / "pyvenv.cfg").exists() or (folder.parent / "pyvenv.cfg").exists()


def _candidates(version: str, hints: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    if sys.executable and short_version() == version:
        yield sys.executable
    path = env.get("PATH", os.defpath)
    for hint in hints:
        yield shutil.which(hint, path=path) or hint
    folders = _folders(path)
    for name in (f"python{version}", "python3", "python"):
        for folder in folders:
            program = shutil.which(name, path=folder)
            if program:
                yield program


def _folders(path: str) -> list[str]:
    on_path = [folder for folder in path.split(os.pathsep) if folder.startswith("/")]
    optional = sorted(str(folder) for folder in Path("/opt").glob("python*/bin"))
    return [*on_path, "/usr/local/bin", "/usr/bin", *optional]
