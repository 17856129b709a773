"""The check of one node: the environment, which describes itself, is the one that was built."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..protocol.codec import decode
from ..protocol.job import Requires
from ..protocol.messages import HostFacts, ProbeAnswer
from ..protocol.problem import Problem, ProblemCode
from ..system import processes
from ..system.own_program import read_source

_FOREIGN = (ProblemCode.MODULE_FOREIGN, ProblemCode.PACKAGE_FOREIGN)


def probe_environment(
    env_dir: str,
    packages: Sequence[str],
    imports: Sequence[str],
    rank_env: Mapping[str, str],
    deep: bool,
    timeout: float,
) -> ProbeAnswer:
    """Ask a staged environment for its packages and the origins of its modules.

    ``imports`` are modules that must be in ``env_dir`` or its ``project``; with ``deep`` they are
    imported, else only located. ``rank_env`` has the variables of a rank.
    """
    program = read_source("checks.description").decode()
    argv = [str(Path(env_dir, "bin", "python")), "-X", "faulthandler", "-c", program]
    asked = {"root": env_dir, "packages": packages, "imports": imports, "deep": deep}
    try:
        text = json.dumps(asked)
        done = processes.run(argv, env=rank_env, cwd=env_dir, timeout=timeout, input=text)
        answer = decode(ProbeAnswer, json.loads(done.stdout))
        if not answer.python:
            raise ValueError("it is no description")
    except processes.ProcessError as exc:
        return ProbeAnswer(problems=(_make_start_problem(env_dir, exc),))
    except ValueError:
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:]
        values = {"answer": " ".join(tail)}
        return ProbeAnswer(problems=(Problem(ProblemCode.PYTHON_GARBLED, env_dir, values),))
    is_foreign = any(problem.code in _FOREIGN for problem in answer.problems)
    return replace(answer, origin_ok=not is_foreign)


def check_requires(requires: Requires, host: HostFacts) -> list[Problem]:
    """Return all reasons why a bundle cannot run on a machine."""
    where = host.hostname
    problems = []
    if host.machine != requires.machine:
        values = {"needed": requires.machine, "machine": host.machine}
        problems.append(Problem(ProblemCode.OTHER_MACHINE, where, values))
    libc, version = host.libc, host.libc_version
    if libc != requires.libc:
        values = {"needed": requires.libc, "libc": f"{libc} {version}".rstrip()}
        problems.append(Problem(ProblemCode.OTHER_LIBC, where, values))
    elif _parse_version(version) < _parse_version(requires.libc_version):
        values = {
            "package": requires.libc_needed_by or "the bundle",
            "needed": f"{libc} {requires.libc_version}",
            "version": version or "none",
        }
        problems.append(Problem(ProblemCode.OLD_LIBC, where, values))
    return problems


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _make_start_problem(env_dir: str, exc: processes.ProcessError) -> Problem:
    code = ProblemCode.PYTHON_FAILED
    if exc.code == -signal.SIGILL:
        code = ProblemCode.PYTHON_ILLEGAL_INSTRUCTION
    elif exc.code == -signal.SIGKILL and not exc.timed_out:
        code = ProblemCode.PYTHON_KILLED
    return Problem(code, env_dir, {"why": ", ".join([exc.reason, *_find_cause(exc.lines)])})


def _find_cause(lines: Sequence[str]) -> list[str]:
    marks = [number for number, line in enumerate(lines) if line.startswith("importing ")]
    since = lines[marks[-1] :] if marks else lines
    errors = [line for line in since if line.startswith(("Fatal Python error", "ImportError"))]
    return [*(since[:1] if marks else ()), *(errors[:1] or since[-1:])]
