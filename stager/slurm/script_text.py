"""The batch script's own text: its comments, and the shell functions it is made of.

Nothing here is filled in but the comment block and the two texts at the script's end: what differs
from one job to the next stands in shell variables at its top, see :mod:`stager.script`.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bundle.protocol.counts import counted
from bundle.redaction.masking import masked

if TYPE_CHECKING:
    from .script import ScriptFacts

MOST_RESTARTS = 10
WIDTH = 98


def batch_log_name(job_name: str, job_id: str) -> str:
    """The name of the file that holds what the batch script and the driver print."""
    return f"{job_name}.{job_id}.batch.out"


def comment(facts: ScriptFacts) -> Iterator[str]:
    """The comment block: what the script does, with what, how to submit it, where logs are."""
    job = facts.job
    logs = one_line(job.log_dir.rstrip("/"))
    name = one_line(job.name)
    batch_log = batch_log_name(name, "JOBID")
    yield from _paragraph(f"{name}: {_purpose(facts)}")
    yield "#"
    yield from _paragraph(
        f"Written by stager {facts.version}. The nodes need no stager: bash, coreutils, gzip and a"
        " Python from 3.9 on do. Only the first node runs this script. It starts the driver there,"
        " which reaches the others through srun and sbcast: it checks every node, brings the bundle"
        " to the local disks that lack it, unpacks, probes" + _last_step(facts)
    )
    yield "#"
    rows = [
        *([("made by", one_line(facts.made_with))] if facts.made_with else []),
        ("bundle", f"{one_line(job.bundle)} ({facts.bundle_bytes / 1e6:.1f} MB)"),
        ("id", job.bundle_id),
        *(
            [("command", one_line(shlex.join(masked(job.launch.command))))]
            if _launches(facts)
            else []
        ),
        ("submit", "sbatch THIS_FILE"),
        ("follow", f"tail -F {logs}/{batch_log}"),
        ("cancel", "scancel JOBID"),
        ("logs", f"{logs}/{name}.JOBID.NODE.RANK.out, one a rank"),
        ("", f"{logs}/preflight.JOBID.txt, one line a node"),
        ("", f"{logs}/events.JOBID.jsonl, everything, for programs"),
    ]
    for key, value in rows:
        yield f"#   {key:8} {value}"
    yield "#"
    yield from _paragraph(
        "The first node must be able to read the bundle. Where it cannot, run `stager run` without"
        " --batch instead: through salloc the driver runs on the login node and sends the bundle"
        " from there. Logs are written by the first node, to a directory of its own where it does"
        " not see yours; Slurm itself writes none, as it would drop a job whose log it cannot open."
    )
    if facts.requeue:
        yield "#"
        yield from _paragraph(
            f"{facts.warning_seconds} s before the time limit Slurm sends USR1: the driver ends"
            " the ranks with TERM and brings results home, and the job goes back into the queue, at"
            f" most {MOST_RESTARTS} times. The training script must resume from its own checkpoint."
        )


def one_line(text: str) -> str:
    """A text for a comment: whatever would end the line is shown, not done."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _launches(facts: ScriptFacts) -> bool:
    return facts.job.action == "run"


def _purpose(facts: ScriptFacts) -> str:
    fewest, most = facts.nodes
    where = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    where += " node" if most == 1 else " nodes"
    if not _launches(facts):
        return f"checks that {where} can run the bundle; nothing is launched."
    launch = facts.job.launch
    nproc = launch.nproc_per_node
    many = "one rank a GPU, or one a node," if nproc is None else f"{counted(nproc, 'rank')} a node"
    return f"runs {many} on {where}, from each node's own disk ({launch.launcher})."


def _last_step(facts: ScriptFacts) -> str:
    return ", and launches the ranks." if _launches(facts) else " and reports."


def _paragraph(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"


TALK = """
say() { printf 'stager: %s\\n' "$*"; }
fail() {
    printf 'stager: %s: %s\\n' "$(uname -n)" "$1" >&2
    exit 3
}
"""

LOG = """
# The log: Slurm opens none, as it drops a job without a word where it cannot (see above). Run by
# hand, or with another --output, the script writes where it was told to. What ranks print may hold
# secrets: only log_umask decides who reads it, and the ranks keep the umask that they came with.
open_log() {
    local log="$log_dir/$name.${SLURM_JOB_ID:-none}.batch.out"
    if ! [ /dev/stdout -ef /dev/null ]; then return; fi
    if (umask "$log_umask" && mkdir -p -- "$log_dir" && : >>"$log"); then
        if [ "$log_umask" = 027 ] && ! chgrp -f --reference="$log_dir" -- "$log"; then
            chmod g= -- "$log"
        fi
        exec >>"$log" 2>&1
    else # it shows in `scontrol show job`, where else
        scontrol update "JobId=${SLURM_JOB_ID:-}" \\
            "Comment=stager: $(uname -n) cannot write $log; name another place with --log-dir"
        exit 3
    fi
}
"""

PLACE = """
# A private directory for the program and the job, removed at the end. A full or missing temporary
# directory is passed over. The shell, too, keeps a long here-document in TMPDIR.
work=
clean_up() { if [ -n "$work" ]; then rm -rf -- "$work"; fi; }
trap clean_up EXIT

make_place() {
    local folder
    for folder in "${SLURM_TMPDIR:-}" "${TMPDIR:-}" /tmp /dev/shm; do
        if [ -z "$folder" ]; then continue; fi
        work=$(mktemp -d "$folder/stager-batch.XXXXXXXX" 2>/dev/null) || continue
        if fill_place; then return; fi
        clean_up
        work=
    done
    fail "no room for the program (1 MB) in \\$SLURM_TMPDIR, \\$TMPDIR, /tmp or /dev/shm; \\
make some, or leave this node out with --exclude=$(uname -n)"
}

fill_place() {
    local TMPDIR=$work
    node_program >"$work/node.pyz" && job_description >"$work/job.json" || return 1
    if ! printf '%s  %s\\n' "$program_sha256" "$work/node.pyz" | sha256sum --check --status; then
        fail "the program is damaged: its sha256 is not $program_sha256; make the script again"
    fi
}
"""

PYTHON = """
find_python() {
    local candidate
    for candidate in "${pythons[@]}" /usr/bin/python3 /usr/local/bin/python3 /opt/*/bin/python3; do
        if "$candidate" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' &>/dev/null; then
            python=$candidate
            return
        fi
    done
    fail "no Python from 3.9 on was found (tried ${pythons[*]}); put one on PATH before sbatch \\
(module load, conda), or leave this node out with --exclude=$(uname -n)"
}
"""

SIGNALS = """
# What Slurm tells this script, it tells the driver, which then ends every rank and collects.
driver=
told=
forward() {
    told=$1
    if [ -n "$driver" ]; then kill -s TERM "$driver" 2>/dev/null || :; fi
}
trap 'forward TERM' TERM
trap 'forward INT' INT
trap 'forward USR1' USR1

# Its exit status is the driver's: 0, 3 (the job or a node failed), 130 (it was told to end).
drive() {
    "$python" -I -S "$work/node.pyz" drive "$work/job.json" &
    driver=$!
    if [ -n "$told" ]; then forward "$told"; fi # it came before there was a driver
    while kill -0 "$driver" 2>/dev/null; do wait "$driver" || :; done # a signal ends a wait early
    wait "$driver"
}
"""

REQUEUE = """
back_into_the_queue() {
    local restarts=${SLURM_RESTART_COUNT:-0}
    if [ "$restarts" -ge "$most_restarts" ]; then
        fail "the time limit came near for the ${restarts}th time; the job is not queued again"
    fi
    say "the time limit is near: back into the queue (restart $((restarts + 1)))"
    clean_up
    scontrol requeue "$SLURM_JOB_ID"
}
"""

_BEGIN = """
main() {
    local status=0
    open_log
    make_place
    find_python
    say "job ${SLURM_JOB_ID:-none} restart ${SLURM_RESTART_COUNT:-0} on ${SLURM_JOB_NODELIST:-?}: \\
driver on $(uname -n), logs in $log_dir"
    drive || status=$?
"""
_END = """    exit "$status"
}
"""

MAIN = _BEGIN + _END

MAIN_REQUEUE = (
    _BEGIN
    + """    if [ "$told" = USR1 ] && [ "$status" -eq 130 ]; then back_into_the_queue; fi
"""
    + _END
)

PROGRAM = """
# The far side's program, a Python zip application.
node_program() {
    base64 -d <<'END_OF_PROGRAM' | gzip -d
@BASE64@
END_OF_PROGRAM
}
"""

PROGRAM_FROM_BUNDLE = """
# The far side's program, a Python zip application, out of the bundle, which is a plain tar. The id
# of a bundle is the digest of its manifest without the id itself.
node_program() {
    local found
    if [ ! -r "$bundle" ]; then
        fail "the bundle $bundle cannot be read from this node; put it on a file system that this \\
node sees, or use \\`stager run\\` without --batch, which sends it from the login node"
    fi
    found=$(tar -xOf "$bundle" manifest.json | sed 's/"id":"[0-9a-f]*",//' | sha256sum) || found=
    if [ "${found%% *}" != "$bundle_id" ]; then
        fail "$bundle is another bundle than the one this script was made for, which has the id \
$bundle_id; make the script again, or put that bundle back"
    fi
    tar -xOf "$bundle" node.pyz
}
"""

JOB = """
# The job, as bundle/protocol/job.py in the program describes it.
job_description() {
    cat <<'END_OF_JOB'
@JSON@
END_OF_JOB
}
"""
