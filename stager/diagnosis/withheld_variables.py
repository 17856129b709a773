"""The failure of a rank that reads a variable which is withheld, as its name is a secret's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from bundle.protocol.job import load
from bundle.protocol.problem import NodeError
from bundle.redaction.secrets import is_secret

from .failure import FirstFailure

_MISSING = re.compile(r"KeyError: '([A-Za-z_][A-Za-z0-9_]*)'")
_OF_ENVIRONMENT = re.compile(r"\benviron\b|<frozen os>|/os\.py\"")
"""Lines of a traceback through ``os.environ``; a key of any other mapping may have such a name."""


def explained(first: FirstFailure, job_file: Path) -> FirstFailure:
    """Return a failure, with its reason and remedy if a withheld variable has caused it."""
    name = _missing_variable(first)
    if not is_secret(name):
        return first
    if name in _passed(job_file):
        return replace(
            first,
            meaning=f"{name} is named in pass-env, but was not set where the job was started",
            hint=f"set {name} in the shell that starts the job, and start it again",
        )
    return replace(
        first,
        meaning=f"{name} was withheld from the ranks, as its name is that of a secret",
        hint=f"pass it to the ranks: stager run --pass-env {name}, or pass-env = "
        f'["{name}"] below [launch] in stager.toml',
    )


def _missing_variable(first: FirstFailure) -> str:
    """Return the variable that ``os.environ`` lacked; empty for any other failure."""
    missing = _MISSING.fullmatch(first.cause)
    if missing is None or not any(_OF_ENVIRONMENT.search(line) for line in first.lines):
        return ""
    return missing[1]


def _passed(job_file: Path) -> tuple[str, ...]:
    try:
        return load(str(job_file)).launch.pass_env
    except NodeError:
        return ()
