"""The comment block at the top of a batch script: what it does, how to submit it, its logs."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bundle.protocol import log_names
from bundle.protocol.counts import counted, sized
from bundle.protocol.enumerations import Action
from bundle.protocol.job import ONE_A_CPU
from bundle.redaction.secrets import masked

if TYPE_CHECKING:
    from .script import ScriptFacts

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


def comment(facts: ScriptFacts) -> Iterator[str]:
    """Yield the lines of the comment block."""
    yield from _paragraph(f"{one_line(facts.job.name)}: {_purpose(facts)}")
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


def one_line(text: str) -> str:
    """Return a text for a comment, with line breaks and control characters shown as escapes."""
    return "".join(_printable_form(char) for char in text)


def _printable_form(char: str) -> str:
    if char.isprintable():
        return char
    return char.encode("unicode_escape").decode("ascii")


def _purpose(facts: ScriptFacts) -> str:
    nodes = _node_count(facts)
    if not _launches(facts):
        return f"checks that {nodes} can run the bundle; nothing is launched."
    launch = facts.job.launch
    ranks = "one rank for each GPU, or one for each node,"
    if launch.nproc_per_node == ONE_A_CPU:
        ranks = "one rank for each CPU"
    elif launch.nproc_per_node is not None:
        ranks = f"{counted(launch.nproc_per_node, 'rank')} a node"
    return f"runs {ranks} on {nodes}, from each node's own disk ({launch.launcher})."


def _node_count(facts: ScriptFacts) -> str:
    least, most = facts.request.nodes
    if least == most:
        return counted(most, "node")
    return f"{least} to {counted(most, 'node')}"


def _overview(facts: ScriptFacts) -> str:
    last_step = ", and launches the ranks." if _launches(facts) else " and reports."
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
    log_dir, name = one_line(job.log_dir.rstrip("/")), one_line(job.name)
    if facts.made_with:
        yield "made by", one_line(facts.made_with)
    yield "bundle", f"{one_line(job.bundle)} ({sized(facts.bundle_bytes)})"
    yield "id", job.bundle_id
    if _launches(facts):
        yield "command", one_line(shlex.join(masked(job.launch.command)))
    yield "submit", "sbatch THIS_FILE"
    yield "follow", f"stager logs JOBID --follow --log-dir {shlex.quote(log_dir)}"
    yield "cancel", "scancel JOBID"
    rank_log = log_names.rank_log(name, "JOBID", "NODE", "RANK")
    yield "logs", f"{log_dir}/{rank_log}, one for each rank"
    yield "", f"{log_dir}/{log_names.preflight('JOBID')}, one line for each node"
    yield "", f"{log_dir}/{log_names.events('JOBID')}, everything, for programs"


def _launches(facts: ScriptFacts) -> bool:
    return facts.job.action is Action.RUN


def _paragraph(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"
