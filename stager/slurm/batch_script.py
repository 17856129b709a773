"""The batch script of a job: its comment block, its text, and how it is submitted."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import textwrap
import zlib
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bundle.driver.transports.slurm_text import CREDENTIALS
from bundle.protocol import log_names
from bundle.protocol.counts import format_count, format_size
from bundle.protocol.enumerations import Action, LogMode
from bundle.protocol.job import ONE_A_CPU, Job
from bundle.redaction.secret_names import remove_secret_variables
from bundle.redaction.secrets import mask_arguments

from ..config.job_settings import list_slurm_rows, make_key
from ..core.errors import ConfigError
from .request import Request

# --- The comment block at the top of a batch script: what it does, how to submit it, its logs ----

MOST_RESTARTS = 10
"""How often a job goes back into the queue at most."""
WIDTH = 98
"""Columns of the comment block."""

_READING_THE_BUNDLE = (
    "The first node must be able to read the bundle. Where it cannot, run `stager run` without"
    " --batch instead: through salloc the driver runs on the login node and sends the bundle"
    " from there. Logs are written by the first node, to a directory of its own if it cannot"
    " see yours; Slurm itself writes none, because it would drop a job whose log it cannot open."
)


def make_comment(facts: ScriptFacts) -> Iterator[str]:
    """Yield the lines of the comment block."""
    yield from _paragraph(f"{escape_line(facts.job.name)}: {_purpose(facts)}")
    yield "#"
    yield from _paragraph(_overview(facts))
    yield "#"
    for key, value in _table(facts):
        yield f"#   {key:8} {value}"
    yield "#"
    yield from _paragraph(_READING_THE_BUNDLE)
    if facts.requeue:
        yield "#"
        yield from _paragraph(_requeue_note(facts))


def escape_line(text: str) -> str:
    """Return a text for a comment, with line breaks and control characters shown as escapes."""
    return "".join(_escape_char(char) for char in text)


def _escape_char(char: str) -> str:
    if char.isprintable():
        return char
    return char.encode("unicode_escape").decode("ascii")


def _purpose(facts: ScriptFacts) -> str:
    nodes = _node_count(facts)
    if not _is_launching(facts):
        return f"checks that {nodes} can run the bundle; nothing is launched."
    launch = facts.job.launch
    ranks = "one rank for each GPU, or one for each node,"
    if launch.nproc_per_node == ONE_A_CPU:
        ranks = "one rank for each CPU"
    elif launch.nproc_per_node is not None:
        ranks = f"{format_count(launch.nproc_per_node, 'rank')} a node"
    return f"runs {ranks} on {nodes}, from each node's own disk ({launch.launcher})."


def _node_count(facts: ScriptFacts) -> str:
    least, most = facts.request.nodes
    if least == most:
        return format_count(most, "node")
    return f"{least} to {format_count(most, 'node')}"


def _overview(facts: ScriptFacts) -> str:
    last_step = ", and launches the ranks." if _is_launching(facts) else " and reports."
    return (
        f"Written by stager {facts.version}. The nodes do not need stager; bash, coreutils,"
        " gzip and Python 3.9 or newer are enough. Only the first node runs this script. It starts"
        " the driver there, which reaches the others through srun and sbcast: it checks every node,"
        " brings the bundle to the local disks that lack it, unpacks,"
        f" probes{last_step}"
    )


def _requeue_note(facts: ScriptFacts) -> str:
    return (
        f"{facts.warning_seconds} s before the time limit Slurm sends USR1: the driver ends the"
        " ranks with TERM and collects the results, and the job goes back into the queue, at most"
        f" {MOST_RESTARTS} times. The training script must resume from its own checkpoint."
    )


def _table(facts: ScriptFacts) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table; an empty key repeats the row above."""
    job = facts.job
    log_dir, name = escape_line(job.log_dir.rstrip("/")), escape_line(job.name)
    if facts.made_with:
        yield "made by", escape_line(facts.made_with)
    yield "bundle", f"{escape_line(job.bundle)} ({format_size(facts.bundle_bytes)})"
    yield "id", job.bundle_id
    if _is_launching(facts):
        yield "command", escape_line(shlex.join(mask_arguments(job.launch.command)))
    yield "submit", "sbatch THIS_FILE"
    yield "follow", f"stager logs JOBID --follow --log-dir {shlex.quote(log_dir)}"
    yield "cancel", "scancel JOBID"
    rank_log = log_names.make_rank_log_name(name, "JOBID", "NODE", "RANK")
    yield "logs", f"{log_dir}/{rank_log}, one for each rank"
    yield "", f"{log_dir}/{log_names.make_preflight_name('JOBID')}, one line for each node"
    yield "", f"{log_dir}/{log_names.make_events_name('JOBID')}, everything, for programs"


def _is_launching(facts: ScriptFacts) -> bool:
    return facts.job.action is Action.RUN


def _paragraph(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"


# --- The batch script of a job, and how it is submitted: functions of one frozen value -----------

# The script is complete. It carries the far side's program and the job's description, so that the
# nodes need neither ``stager`` nor the login node's home directory: bash, coreutils, gzip and any
# Python 3.9 or newer will do. Its shell is ``batch.sh`` beside this file; here it is filled
# in. Launching the ranks is the driver's part, see ``bundle/driver/driver.py``.

OLDEST_PYTHON = (3, 9)
NEWEST_PYTHON = (3, 15)
"""Names from ``python3.15`` down to ``python3.9`` are looked for on a node."""
BASE64_COLUMNS = 76

TEMPLATE = Path(__file__).with_name("batch.sh")
"""The shell of the script; its first lines say how it is filled in."""
_PLACEHOLDER = re.compile(r"@(\w+)@")
_CONDITION = "#@if "
_END = "#@end"
_TEMPLATE_ONLY = ("#@", "# shellcheck ")

_ENCLOSING_JOB = re.compile(r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_")
_SLURM_ITSELF = frozenset(
    (
        *("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_DEBUG_FLAGS"),
        *("SLURM_JWT", "SLURM_TIME_FORMAT"),
    )
)
"""How to reach and authenticate to Slurm, and how it prints: these say nothing of a job."""
_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$|NODE_RANK$|ROLE_NAME$"
    r"|MASTER_(ADDR|PORT)$|(TORCHELASTIC|PET|PMI|PMIX|OMPI|PALS)_"
)
_HEADER_VARIABLES = re.compile(
    r"SBATCH_(ARRAY_INX|ERROR|EXPORT|GET_USER_ENV|IGNORE_PBS|INPUT|JOB_NAME|NO_KILL|(NO_)?REQUEUE"
    r"|OPEN_MODE|OUTPUT|SIGNAL|WAIT(_ALL_NODES)?)$"
)
"""Defaults of the user that would win over the script's own ``#SBATCH`` lines (man sbatch)."""
_WITHOUT_VARIABLE = ("nodes", "cpus-per-task", "exclude", "nodelist")
"""Options that users and sites do not set in variables of sbatch."""
_SIGNAL_DELAY_SECONDS = 83
"""A minute, by which Slurm may send a signal late (sbatch, ``--signal``), and time to collect."""


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Everything that decides what a batch script says."""

    job: Job
    """The job, for Slurm and not yet bound; its name, CPUs and log directory are the script's."""
    program: bytes
    bundle_bytes: int
    request: Request
    """The request for nodes that the ``#SBATCH`` lines make."""
    version: str
    requeue: bool = False
    """Whether the job goes back into the queue when its time is nearly up, or a node is lost."""
    embed: bool = True
    """Whether the script holds the program; otherwise it takes it out of the bundle with tar."""
    made_with: str = ""
    """The command that makes this script again, for its comment block."""

    @property
    def warning_seconds(self) -> int:
        """Seconds before its time limit at which a job that is queued again gets its signal.

        Slurm may be late by up to a minute; then the ranks save, and their results are collected.
        """
        return _SIGNAL_DELAY_SECONDS + self.job.launch.grace_seconds


def batch_script(facts: ScriptFacts) -> str:
    """Return the text of the batch script: the same facts, the same text.

    Raises:
        ConfigError: a value that cannot stand in a ``#SBATCH`` line; the message names its key.
    """
    values = {
        "directives": "\n".join(_make_directives(facts)),
        "comment": "\n".join(make_comment(facts)),
        **_shell_variables(facts),
        "job_json": _job_json(facts.job),
    }
    cases = {"embed"} if facts.embed else {"from_bundle"}
    if facts.embed:
        values["program_base64"] = _program_base64(facts.program)
    if facts.requeue:
        cases.add("requeue")
    return fill_template(TEMPLATE.read_text(encoding="utf-8"), values, cases)


def fill_template(template: str, values: Mapping[str, str], cases: Collection[str]) -> str:
    """Fill in a template (syntax: see ``batch.sh``); placeholders within values stay."""
    lines = []
    keep = True
    for line in template.splitlines(keepends=True):
        if line.startswith(_CONDITION):
            keep = line.removeprefix(_CONDITION).strip() in cases
        elif line.startswith(_END):
            keep = True
        elif keep and not line.startswith(_TEMPLATE_ONLY):
            lines.append(_PLACEHOLDER.sub(lambda match: values[match[1]], line))
    return "".join(lines)


def make_submit_argv(facts: ScriptFacts) -> list[str]:
    """Return the command that submits the script from its standard input and prints the job's id.

    Its output is ``ID`` or ``ID;CLUSTER``. The options that users and sites like to set in
    variables (``SBATCH_PARTITION``...) are repeated: variables win over a script's lines, and the
    command line over both.
    """
    argv = ["sbatch", "--parsable", "--export=ALL"]
    options = facts.request.make_named_options()
    for key in map(make_key, list_slurm_rows()):
        value = options[key]
        if value and key not in _WITHOUT_VARIABLE:
            argv.append(f"--{key}={_refuse_unprintable(key, value)}")
    return argv


def make_submit_environment(
    base: Mapping[str, str], pass_env: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables to run ``sbatch`` or ``salloc`` with, and so those of the job.

    From within a job, all that describes it is left out, or the new job would inherit its shape;
    outside one, a site's ``SBATCH_ACCOUNT`` and the like stay, except those that would undo what
    the script says about itself. Rank variables and secrets are left out everywhere.
    """
    inside_job = "SLURM_JOB_ID" in base or "SLURM_JOBID" in base
    kept = {name: value for name, value in base.items() if _is_kept(name, inside_job)}
    return remove_secret_variables(kept, (*CREDENTIALS, *pass_env))


def _is_kept(name: str, inside_job: bool) -> bool:
    if name in _SLURM_ITSELF:
        return True
    if inside_job and _ENCLOSING_JOB.match(name):
        return False
    return not _HEADER_VARIABLES.match(name) and not _RANK_VARIABLES.match(name)


def _make_directives(facts: ScriptFacts) -> Iterator[str]:
    options = {**facts.request.make_named_options(), "output": "/dev/null"}
    if facts.requeue:
        options["signal"] = f"B:USR1@{facts.warning_seconds}"
    for key, value in options.items():
        if value:
            yield f"#SBATCH --{key}={_sbatch_word(_refuse_unprintable(key, value))}"
    yield "#SBATCH --requeue" if facts.requeue else "#SBATCH --no-requeue"
    yield "#SBATCH --no-kill"
    if facts.request.salloc_args:
        words = [
            _sbatch_word(_refuse_unprintable("salloc-args", word))
            for word in facts.request.salloc_args
        ]
        yield f"#SBATCH {' '.join(words)}"


def _sbatch_word(text: str) -> str:
    """Quote a word for sbatch: ``#`` starts a comment, a backslash escapes within quotes too."""
    if re.fullmatch(r"[\w@%+=:,./\[\]*-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'


def _refuse_unprintable(key: str, value: str) -> str:
    """Refuse a value that would begin another line, or show as something else than it is."""
    if not value.isprintable():
        raise ConfigError(
            f"cluster.{key}: {value!r} holds a line break or a control character, which would"
            " end its #SBATCH line in the batch script",
            hint="take it out, in stager.toml or on the command line",
        )
    return value


def _shell_variables(facts: ScriptFacts) -> dict[str, str]:
    job = facts.job
    return {
        "bundle": shlex.quote(job.bundle),
        "bundle_id": job.bundle_id,
        "name": shlex.quote(job.name),
        "log_dir": shlex.quote(job.log_dir.rstrip("/")),
        "log_umask": "027" if job.log_mode is LogMode.GROUP else "077",
        "program_sha256": hashlib.sha256(facts.program).hexdigest(),
        "pythons": "\n".join(f"    {shlex.quote(python)}" for python in _pythons(job)),
        "most_restarts": str(MOST_RESTARTS),
    }


def _pythons(job: Job) -> list[str]:
    newest, oldest = NEWEST_PYTHON[1], OLDEST_PYTHON[1]
    versions = [f"python3.{minor}" for minor in range(newest, oldest - 1, -1)]
    return list(dict.fromkeys([*job.python_hints, "python3", *versions, "python"]))


def _program_base64(program: bytes) -> str:
    """Return the gzipped program as base64 (a quarter the size): Slurm stores each script."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    text = b64encode(packer.compress(program) + packer.flush()).decode("ascii")
    starts = range(0, len(text), BASE64_COLUMNS)
    return "\n".join(text[start : start + BASE64_COLUMNS] for start in starts)


def _job_json(job: Job) -> str:
    """Return the job's description: ASCII, one field a line.

    It holds only the names of secret variables. The command is complete, whatever it holds, as
    nothing else tells the driver what to run: Slurm shows a script to its owner and to operators.
    """
    return json.dumps(job.to_json(), indent=2, ensure_ascii=True)
