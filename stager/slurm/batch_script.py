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
from pathlib import Path

from bundle.driver.transports.slurm_text import CREDENTIALS
from bundle.protocol import log_names
from bundle.protocol.counts import format_count, format_size
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Action, LogMode
from bundle.protocol.job import ONE_A_CPU, Job
from bundle.redaction.secret_names import remove_secret_variables
from bundle.redaction.secrets import mask_arguments
from bundle.regex import compile_lazily

from ..config.job_settings import list_slurm_rows, make_key
from ..core.errors import ConfigError
from .request import Request

# The script carries the far side's program and the job's description, so that the nodes need
# neither ``stager`` nor the login node's home: bash, coreutils, gzip and Python 3.9 will do.

OLDEST_PYTHON = (3, 9)
NEWEST_PYTHON = (3, 15)  # names from ``python3.15`` down to ``python3.9`` are looked for on a node
_BASE64_COLUMNS = 76

TEMPLATE = Path(__file__).with_name("batch.sh")  # its first lines say how it is filled in
MOST_RESTARTS = 10  # how often a job goes back into the queue at most
_COLUMNS = 98  # columns of the comment block
_PLACEHOLDER = compile_lazily(r"@(\w+)@")
_CONDITION = "#@if "
_END = "#@end"
_TEMPLATE_ONLY = ("#@", "# shellcheck ")

_ENCLOSING_JOB = compile_lazily(r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_")
_SLURM_ITSELF = (
    *("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_DEBUG_FLAGS"),
    *("SLURM_JWT", "SLURM_TIME_FORMAT"),
)
"""How to reach and authenticate to Slurm, and how it prints: these say nothing of a job."""
_RANK_VARIABLES = compile_lazily(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$|NODE_RANK$|ROLE_NAME$"
    r"|MASTER_(ADDR|PORT)$|(TORCHELASTIC|PET|PMI|PMIX|OMPI|PALS)_"
)
_HEADER_VARIABLES = compile_lazily(
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

    job: Job  # for Slurm and not yet bound; its name, CPUs and log directory are the script's
    program: bytes
    bundle_bytes: int
    request: Request
    version: str
    requeue: bool = False  # back into the queue when its time is nearly up, or a node is lost
    embed: bool = True  # the script holds the program; else it takes it out of the bundle with tar
    made_with: str = ""  # the command that makes this script again, for its comment block

    @property
    def warning_seconds(self) -> int:
        """Seconds before its time limit at which a job that is queued again gets its signal."""
        return _SIGNAL_DELAY_SECONDS + self.job.launch.grace_seconds


def batch_script(facts: ScriptFacts) -> str:
    """Return the text of the batch script: the same facts, the same text."""
    values = _make_values(facts)
    cases = {facts.job.action.value, "embed" if facts.embed else "from_bundle"}
    if facts.requeue:
        cases.add("requeue")
    lines, keep = [], True
    for line in TEMPLATE.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith(_CONDITION):
            keep = line.removeprefix(_CONDITION).strip() in cases
        elif line.startswith(_END):
            keep = True
        elif keep and not line.startswith(_TEMPLATE_ONLY):  # placeholders within values stay
            lines.append(_PLACEHOLDER.sub(lambda match: values[match[1]], line))
    return "".join(lines)


def _make_values(facts: ScriptFacts) -> dict[str, str]:
    job = facts.job
    versions = [f"python3.{minor}" for minor in range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1)]
    pythons = dict.fromkeys([*job.python_hints, "python3", *versions, "python"])
    return {
        "directives": "\n".join(_make_directives(facts)),
        "purpose": "\n".join(_make_purpose(facts)),
        "version": facts.version,
        "facts": "\n".join(f"#   {key:8} {value}" for key, value in _list_facts(facts)),
        "warning_seconds": str(facts.warning_seconds),
        "bundle": shlex.quote(job.bundle),
        "bundle_id": job.bundle_id,
        "name": shlex.quote(job.name),
        "log_dir": shlex.quote(job.log_dir.rstrip("/")),
        "log_umask": "027" if job.log_mode is LogMode.GROUP else "077",
        "program_sha256": hashlib.sha256(facts.program).hexdigest(),
        "pythons": "\n".join(f"    {shlex.quote(python)}" for python in pythons),
        "most_restarts": str(MOST_RESTARTS),
        # ASCII, one field a line. It holds only the names of secret variables. The command is
        # complete, whatever it holds, as nothing else tells the driver what to run: Slurm shows a
        # script to its owner and to operators.
        "job_json": json.dumps(job.to_json(), indent=2),
        "program_base64": _encode_program(facts.program) if facts.embed else "",
    }


def _make_purpose(facts: ScriptFacts) -> Iterator[str]:
    job, (least, most) = facts.job, facts.request.nodes
    counted = format_count(most, "node")
    nodes = counted if least == most else f"{least} to {counted}"
    number = job.launch.nproc_per_node
    fixed = {
        None: "one rank for each GPU, or one for each node,",
        ONE_A_CPU: "one rank for each CPU",
    }
    ranks = fixed.get(number) or f"{format_count(number or 0, 'rank')} a node"
    does = f"runs {ranks} on {nodes}, from each node's own disk ({job.launch.launcher})."
    if job.action is not Action.RUN:
        does = f"checks that {nodes} can run the bundle; nothing is launched."
    text = f"{_escape_line(job.name)}: {does}"
    wrapper = textwrap.TextWrapper(_COLUMNS - 2, break_long_words=False, break_on_hyphens=False)
    yield from (f"# {line}" for line in wrapper.wrap(text))


def _list_facts(facts: ScriptFacts) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table for the comment block; an empty key repeats the row above."""
    job = facts.job
    log_dir, name = _escape_line(job.log_dir.rstrip("/")), _escape_line(job.name)
    if facts.made_with:
        yield "made by", _escape_line(facts.made_with)
    yield "bundle", f"{_escape_line(job.bundle)} ({format_size(facts.bundle_bytes)})"
    yield "id", job.bundle_id
    if job.action is Action.RUN:
        yield "command", _escape_line(shlex.join(mask_arguments(job.launch.command)))
    yield "submit", "sbatch THIS_FILE"
    yield "follow", f"stager logs JOBID --follow --log-dir {shlex.quote(log_dir)}"
    yield "cancel", "scancel JOBID"
    rank_log = log_names.make_rank_log_name(name, "JOBID", "NODE", "RANK")
    yield "logs", f"{log_dir}/{rank_log}, one for each rank"
    yield "", f"{log_dir}/{log_names.make_preflight_name('JOBID')}, one line for each node"
    yield "", f"{log_dir}/{log_names.make_events_name('JOBID')}, everything, for programs"


def _escape_line(text: str) -> str:
    """Return a text for a comment, with line breaks and control characters shown as escapes."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(shown)


def make_submit_argv(facts: ScriptFacts) -> list[str]:
    """Return the command that submits the script and prints ``ID`` or ``ID;CLUSTER``."""
    # Variables (``SBATCH_PARTITION``...) win over a script's lines, and the command line over both.
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

    All that describes a job this runs in is left out, and what would undo the script's own lines. A
    site's ``SBATCH_ACCOUNT`` and the like stay.
    """
    left_out = [_HEADER_VARIABLES, _RANK_VARIABLES]
    if "SLURM_JOB_ID" in base or "SLURM_JOBID" in base:
        left_out.append(_ENCLOSING_JOB)
    kept = {
        name: value
        for name, value in base.items()
        if name in _SLURM_ITSELF or not any(pattern.match(name) for pattern in left_out)
    }
    return remove_secret_variables(kept, (*CREDENTIALS, *pass_env))


def _make_directives(facts: ScriptFacts) -> Iterator[str]:
    options = {**facts.request.make_named_options(), "output": "/dev/null"}
    if facts.requeue:
        options["signal"] = f"B:USR1@{facts.warning_seconds}"
    for key, value in options.items():
        if value:
            yield f"#SBATCH --{key}={_sbatch_word(_refuse_unprintable(key, value))}"
    yield "#SBATCH --requeue" if facts.requeue else "#SBATCH --no-requeue"
    yield "#SBATCH --no-kill"
    words = [_refuse_unprintable("salloc-args", word) for word in facts.request.salloc_args]
    if words:
        yield f"#SBATCH {' '.join(map(_sbatch_word, words))}"


def _sbatch_word(text: str) -> str:
    """Quote a word for sbatch: ``#`` starts a comment, a backslash escapes within quotes too."""
    if re.fullmatch(r"[\w@%+=:,./\[\]*-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'


def _refuse_unprintable(key: str, value: str) -> str:
    """Refuse a value that would begin another line, or show as something else than it is."""
    if not value.isprintable():
        raise ConfigError(
            f"cluster.{key}: {value!r} holds a line break or a control character",
            hint="take it out, in stager.toml or on the command line",
        )
    return value


def _encode_program(program: bytes) -> str:
    """Return the gzipped program as base64 (a quarter the size): Slurm stores each script."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    text = b64encode(packer.compress(program) + packer.flush()).decode("ascii")
    starts = range(0, len(text), _BASE64_COLUMNS)
    return "\n".join(text[start : start + _BASE64_COLUMNS] for start in starts)
