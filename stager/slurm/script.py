"""The batch script of a job, and how it is submitted: pure functions of one frozen value.

The script is complete. It carries the far side's program and the job's description along, so that
the nodes need neither ``stager`` nor the login node's home directory: bash, coreutils, gzip and any
Python from 3.9 on will do. Launching the ranks is the driver's part, see
``bundle/driver/driver.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import zlib
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from bundle.driver.transports.slurm_commands import CREDENTIALS
from bundle.protocol import log_modes
from bundle.protocol.job import Job
from bundle.redaction.masking import without_secrets

from ..core.errors import ConfigError
from . import script_text as parts

OLDEST_PYTHON = (3, 9)
NEWEST_PYTHON = (3, 15)
"""Names from ``python3.15`` down to ``python3.9`` are looked for on a node."""
BASE64_COLUMNS = 76

_ENCLOSING_JOB = re.compile(r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_")
_SLURM_ITSELF = frozenset(
    (
        *("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_DEBUG_FLAGS"),
        *("SLURM_JWT", "SLURM_TIME_FORMAT"),
    )
)
"""How to reach and authenticate to Slurm, and how it talks: no trace of an enclosing job."""
_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$|NODE_RANK$|ROLE_NAME$"
    r"|MASTER_(ADDR|PORT)$|(TORCHELASTIC|PET|PMI|PMIX|OMPI|PALS)_"
)
_HEADER_VARIABLES = re.compile(
    r"SBATCH_(ARRAY_INX|ERROR|EXPORT|GET_USER_ENV|IGNORE_PBS|INPUT|JOB_NAME|NO_KILL|(NO_)?REQUEUE"
    r"|OPEN_MODE|OUTPUT|SIGNAL|WAIT(_ALL_NODES)?)$"
)
"""Defaults of the user that would win over the script's own ``#SBATCH`` lines (man sbatch)."""


_TELLING_SECONDS = 83


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Everything that decides what a batch script says."""

    job: Job
    """The job, for Slurm and not yet bound; its name, CPUs and log directory are the script's."""
    program: bytes
    """The far side's program, ``node.pyz``."""
    bundle_bytes: int
    """The bundle's size."""
    nodes: tuple[int, int]
    """Fewest and most nodes; the same number twice for exactly so many."""
    version: str
    """Version of stager that makes the script."""
    partition: str | None = None
    """``[cluster] partition``; None leaves it to Slurm, here and below."""
    account: str | None = None
    """``[cluster] account``."""
    time: str | None = None
    """``[cluster] time``."""
    exclude: str | None = None
    """Nodes to avoid, in Slurm's notation."""
    gpus_per_node: str | None = None
    """``[cluster] gpus-per-node``: ``4``, or ``a100:4``."""
    sbatch_args: tuple[str, ...] = ()
    """``[cluster] salloc-args``, passed on as they are."""
    requeue: bool = False
    """Whether the job goes back into the queue when its time is nearly up, or a node is lost."""
    embed: bool = True
    """Whether the script holds the program; otherwise it takes it out of the bundle with tar."""
    made_with: str = ""
    """The command that makes this script again, for its comment block."""

    @property
    def warning_seconds(self) -> int:
        """How long before its time limit a job that is queued again is told.

        Slurm is late by up to a minute (sbatch, ``--signal``); then the ranks save, and what they
        made comes home.
        """
        return _TELLING_SECONDS + self.job.launch.grace_seconds


def batch_script(facts: ScriptFacts) -> str:
    """The text of the batch script: the same facts, the same text.

    Raises:
        ConfigError: a value that cannot stand in a ``#SBATCH`` line; the message names its key.
    """
    sections = [
        "\n".join(["#!/bin/bash", *_directives(facts), "#", *parts.comment(facts)]),
        "\n".join(["set -euo pipefail", "", *_variables(facts)]),
        parts.TALK,
        parts.LOG,
        parts.PLACE,
        parts.PYTHON,
        parts.SIGNALS,
        parts.REQUEUE if facts.requeue else "",
        parts.MAIN_REQUEUE if facts.requeue else parts.MAIN,
        _program(facts),
        _job(facts.job),
        "main",
    ]
    return "\n\n".join(section.strip("\n") for section in sections if section) + "\n"


def submit_argv(facts: ScriptFacts, *, wait: bool = False) -> list[str]:
    """The command that submits the script from its standard input and prints the job's id.

    Its output is ``ID`` or ``ID;CLUSTER``. The options that users and sites like to set in
    variables (``SBATCH_PARTITION``...) are repeated: variables win over a script's lines, and the
    command line over both.

    Args:
        facts: what the script was made from.
        wait: whether ``sbatch`` ends with the job and with its exit status.

    Raises:
        ConfigError: see :func:`batch_script`.
    """
    repeated = {"partition": facts.partition, "account": facts.account, "time": facts.time}
    return [
        "sbatch",
        "--parsable",
        *(["--wait"] if wait else []),
        "--export=ALL",
        *(f"--{key}={_printable(key, value)}" for key, value in repeated.items() if value),
    ]


def submit_environment(base: Mapping[str, str], pass_env: Collection[str] = ()) -> dict[str, str]:
    """The variables to run ``sbatch`` or ``salloc`` with, and so those of the job.

    From within a job, all that describes it is left out, or the new job would inherit its shape;
    outside one, a site's ``SBATCH_ACCOUNT`` and the like stay, except those that would undo what
    the script says about itself. Rank variables and secrets are left out everywhere.

    Args:
        base: the caller's variables.
        pass_env: names of secrets that are wanted all the same.
    """
    inside = "SLURM_JOB_ID" in base or "SLURM_JOBID" in base
    kept = {
        name: value
        for name, value in base.items()
        if name in _SLURM_ITSELF
        or not (
            (inside and _ENCLOSING_JOB.match(name))
            or _HEADER_VARIABLES.match(name)
            or _RANK_VARIABLES.match(name)
        )
    }
    return without_secrets(kept, (*CREDENTIALS, *pass_env))


def _directives(facts: ScriptFacts) -> Iterator[str]:
    """The ``#SBATCH`` lines."""
    job = facts.job
    fewest, most = facts.nodes
    options = {
        "job-name": job.name,
        "nodes": str(fewest) if fewest == most else f"{fewest}-{most}",
        # With a range, it would have Slurm give the fewest of the nodes (seen with 22.05).
        "ntasks-per-node": "1" if fewest == most else None,
        "cpus-per-task": str(job.cpus_per_task) if job.cpus_per_task else None,
        "gpus-per-node": facts.gpus_per_node,
        "partition": facts.partition,
        "account": facts.account,
        "time": facts.time,
        "exclude": facts.exclude,
        "output": "/dev/null",
        "signal": f"B:USR1@{facts.warning_seconds}" if facts.requeue else None,
    }
    for key, value in options.items():
        if value:
            yield f"#SBATCH --{key}={_sbatch_word(_printable(key, value))}"
    yield "#SBATCH --requeue" if facts.requeue else "#SBATCH --no-requeue"
    yield "#SBATCH --no-kill"
    if facts.sbatch_args:
        words = [_sbatch_word(_printable("salloc-args", word)) for word in facts.sbatch_args]
        yield f"#SBATCH {' '.join(words)}"


def _sbatch_word(text: str) -> str:
    """A word as sbatch reads it: ``#`` starts a comment, a backslash escapes within quotes too."""
    if re.fullmatch(r"[\w@%+=:,./\[\]*-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'


def _printable(key: str, value: str) -> str:
    """Refuse what would begin another line, or show as something else than it is."""
    if not value.isprintable():
        raise ConfigError(
            f"cluster.{key}: {value!r} holds a line break or a control character, which would"
            " end its #SBATCH line in the batch script",
            hint="take it out, in stager.toml or on the command line",
        )
    return value


def _variables(facts: ScriptFacts) -> Iterator[str]:
    """What differs from one script to the next, as shell variables."""
    newest, oldest = NEWEST_PYTHON[1], OLDEST_PYTHON[1]
    names = [f"python3.{minor}" for minor in range(newest, oldest - 1, -1)]
    pythons = dict.fromkeys([*facts.job.python_hints, "python3", *names, "python"])
    yield "# What differs from one job to the next."
    if not facts.embed:
        yield f"bundle={shlex.quote(facts.job.bundle)}"
        yield f"bundle_id={facts.job.bundle_id}"
    yield f"name={shlex.quote(facts.job.name)}"
    yield f"log_dir={shlex.quote(facts.job.log_dir.rstrip('/'))}"
    yield f"log_umask={'027' if facts.job.log_mode == log_modes.GROUP else '077'}"
    yield f"program_sha256={hashlib.sha256(facts.program).hexdigest()}"
    yield "# Pythons to try, in this order; the driver runs on any one from 3.9 on."
    yield "pythons=("
    yield from (f"    {shlex.quote(python)}" for python in pythons)
    yield ")"
    if facts.requeue:
        yield "# How often the job goes back into the queue at most; it shall not circle for ever."
        yield f"most_restarts={parts.MOST_RESTARTS}"


def _program(facts: ScriptFacts) -> str:
    if not facts.embed:
        return parts.PROGRAM_FROM_BUNDLE
    # In gzip's form, without a name or a time; a quarter of the size is kept by Slurm for each job.
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    text = b64encode(packer.compress(facts.program) + packer.flush()).decode("ascii")
    lines = [text[at : at + BASE64_COLUMNS] for at in range(0, len(text), BASE64_COLUMNS)]
    return parts.PROGRAM.replace("@BASE64@", "\n".join(lines))


def _job(job: Job) -> str:
    """The job's description: ASCII, one field a line.

    Of secret variables it has only the names. The command is complete, whatever it holds, as
    nothing else tells the driver what to run: Slurm shows a script to its owner and to operators.
    """
    return parts.JOB.replace("@JSON@", json.dumps(job.to_json(), indent=2, ensure_ascii=True))
