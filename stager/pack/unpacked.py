"""A bundle that is unpacked on this machine, by the program that does so on nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bundle.node.node_root import ROOT_VARIABLE
from bundle.protocol.problem import Problem

from ..core.errors import BundleError
from ..core.processes import CommandError, Runner, run
from .existing import ChosenBundle

_SECONDS = 1200.0


def unpacked(
    program: Path, bundle: ChosenBundle, folder: Path, *, trusted: bool, run: Runner = run
) -> Path:
    """Make the environment of a bundle below a directory, and return its path.

    Raises:
        BundleError: it cannot be unpacked here.
        CommandError: the program fails for another reason.
    """
    python = getattr(sys, "_base_executable", sys.executable)
    argv = [sys.executable, "-I", "-S", str(program), "unpack", str(bundle.path), str(folder)]
    argv += ["--id", bundle.id, "--json", "--python", python, *(["--trusted"] if trusted else [])]
    done = run(argv, timeout=_SECONDS, env={ROOT_VARIABLE: str(folder)}, check=False)
    answer = done.stdout.rstrip("\n").rpartition("\n")[2]
    if done.returncode == 0:
        return Path(answer)
    try:
        problem = Problem.from_json(json.loads(answer)["problem"])
    except (ValueError, KeyError, TypeError):
        raise CommandError(done, reason="the bundle could not be unpacked") from None
    raise BundleError(f"{problem.where}: {problem.what}: {problem.why}", hint=problem.fix)
