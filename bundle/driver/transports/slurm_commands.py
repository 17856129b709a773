"""Slurm is text: what is asked of it, and how its answers are read. Pure functions, no effects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...protocol.job import Job, check
from ...protocol.problem import NodeError, Problem
from ...system.hostlist import expand_hostlist, fold
from ...transfer import forecast

PATIENCE = 600
"""Seconds that the others get once the first node has ended well; ``SLURM_WAIT`` is the user's own.

A thread or an exit handler that never ends would hold the allocation until its time limit; but a
rank may also be saving a large model while the others have ended, hence not a minute. The
driver counts, as ``srun --wait`` would kill without a word of which rank it was.
"""
_BACKSTOP = 30
"""Seconds later ``srun`` does it all the same, should an agent not answer any more."""

STARTER = """\
boot=$1 phase=$2; shift 2
for python in "$@"; do
    if "$python" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
        exec "$python" -I -S -c "$boot" agent "$phase"
    fi
done
printf '\\036%s 0 0 - . ' "$SLURMD_NODENAME:${SLURM_PROCID:-0}"
printf '{"v": 1, "event": "%s", "node": "%s", "ok": false, "seconds": 0, "problems": [{' \\
    "$phase" "$SLURMD_NODENAME"
printf '"what": "no Python 3.9 or newer was found", "where": "%s", ' "$SLURMD_NODENAME"
printf '"why": "tried %s names, python3 on PATH among them", ' "$#"
printf '"fix": "install Python there, or leave the node out with --exclude=%s"}]}\\n' \\
    "$SLURMD_NODENAME"
exit 3
"""
"""The shell's part on a node: the first Python that is new enough gets the bootstrap program."""

CREDENTIALS = ("SLURM_JWT",)
"""Secrets that Slurm's own commands need where munge is not used; ranks do not get them."""

PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10")

_OWN_OPTIONS = re.compile(
    r"SLURM_(LABELIO|UNBUFFEREDIO|STD(IN|OUT|ERR)MODE|OPEN_MODE|EXPORT_ENV|MPI_TYPE|WAIT"
    r"|KILL_BAD_EXIT|DISTRIBUTION|CPU_BIND\w*|MEM_BIND\w*|NTASKS\w*|NPROCS|TASKS_PER_NODE"
    r"|CPUS_PER_TASK|TRES_PER_TASK|THREADS_PER_CORE|HINT|EXACT|OVERLAP|OVERCOMMIT|PROLOG|EPILOG"
    r"|TASK_PROLOG|TASK_EPILOG|WORKING_DIR|STEP\w*|DEBUG|TEST_EXEC|IMMEDIATE|NO_KILL|TIMELIMIT"
    r"|SRUN_\w+|MULTI_PROG|PTY\w*|JOB_NAME)$|SRUN_\w+$"
)
"""Variables that ``srun`` takes for options, and that would change what a step of ours does."""

_TASK = re.compile(r"srun: error: (\S+?): tasks? ([\d,-]+): (.+)")
_LAUNCH = re.compile(r"Task launch for \S+ failed on node (\S+?): (.+)")
_LOST = re.compile(r"Node failure on (\S+)")
_CONTROLLER = re.compile(
    r"(?:Unable to (?:confirm allocation for|create step for) job \S+|Job step creation failed"
    r"|Slurm job (?:ID )?\S+ lookup error|Unable to allocate resources): "
    r"(?P<fault>Unable to contact slurm controller.*|Socket timed out on send/recv.*"
    r"|Zero Bytes were transmitted or received|Message (?:receive|send) failure"
    r"|Communication (?:connection|shutdown) failure|.*(?:standby mode|temporarily disabled).*)"
)
"""How a command says that it could not even ask; nothing of what it was to begin has begun."""
_NETWORK = re.compile(
    r"Communication (?:connection|shutdown) failure|timed out|Connection (?:refused|reset)"
    r"|unreachable|No route|(?:receive|send) failure|Zero Bytes|find an address|not responding"
)
_NO_START = "Slurm can start nothing there"
_TAKEN_ALONG = re.compile(r"tasks? [\d,-]+: (Killed|Terminated)$")
_EXITED = re.compile(r"Exited with exit code (\d+)$")
_BROADCAST = re.compile(r"sbcast: error: REQUEST_FILE_BCAST\((\S+?)\): (.+)")
_VERSION = re.compile(r"(\d+)\.(\d+)")
_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Step:
    """One ``srun`` of ours."""

    phase: str
    """The agents' phase; also the step's name."""
    nodes: tuple[str, ...]
    """The nodes it runs on."""
    cpus: int
    """CPUs of each task."""
    tasks_per_node: int = 1
    """More than one only where Slurm itself starts the ranks."""
    together: bool = False
    """Whether the first task that fails takes the others with it."""
    patience: int = 0
    """Seconds that tasks may go on after the first has ended; 0 for any time."""
    image: str | None = None
    """Container image, for the pyxis plugin."""
    mounts: tuple[str, ...] = ()
    """What the container sees of the node."""


_DOWN = ("down", "fail", "unknown", "powered_down", "powering_down")


def bind(job: Job, env: Mapping[str, str]) -> Job:
    """A job that knows its allocation: id, nodes, and how often it was started before.

    Raises:
        NodeError: there is no allocation, it has fewer nodes than the job needs, or its id or
            its nodes' names cannot be part of a file's name.
    """
    job_id, listed = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
    if not job_id or not listed:
        why = "SLURM_JOB_ID and SLURM_JOB_NODELIST are not both set"
        fix = "start it with salloc or sbatch, or use --allocation local"
        raise NodeError(Problem("there is no Slurm allocation", "", why, fix))
    nodes = expand_hostlist(listed)
    least, most = job.wanted or (1, len(nodes))
    least = job.min_nodes or least
    if len(nodes) < least:
        why = f"job {job_id} has {len(nodes)}, {least} are asked for"
        fix = f"use --nodes {len(nodes)}, or ask Slurm for more"
        raise NodeError(Problem("the allocation has too few nodes", "", why, fix))
    restart = env.get("SLURM_RESTART_COUNT", "0")
    bound = replace(
        job,
        id=job_id,
        nodes=tuple(nodes[:most]),
        attempt=int(restart) if restart.isdigit() else 0,
    )
    try:
        check(bound)
    except ValueError as exc:
        fix = "see who has set SLURM_JOB_ID and SLURM_JOB_NODELIST: they are not Slurm's own"
        raise NodeError(Problem("the Slurm allocation cannot be used", "", str(exc), fix)) from exc
    return bound


def patience(env: Mapping[str, str]) -> int:
    """Seconds that nodes may go on after the first has ended well; 0 for any time."""
    asked = env.get("SLURM_WAIT", "")
    return int(asked) if asked.isascii() and asked.isdigit() else PATIENCE


def cpus_per_node(text: str) -> list[int]:
    """Read ``SLURM_JOB_CPUS_PER_NODE``: ``4(x3),8`` stands for 4, 4, 4 and 8; [] if it cannot."""
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNTS.fullmatch(part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def step_argv(step: Step, program: Sequence[str]) -> list[str]:
    """The command that runs a program on each node of a step.

    ``--overlap`` lets it run beside other steps of the allocation; ``-c`` is given because some
    versions do not inherit it (22.05, 23.02); the working directory is one that is everywhere.
    """
    count = len(step.nodes)
    argv = [
        "srun",
        f"--job-name=stager-{step.phase}",
        f"--nodes={count}",
        f"--nodelist={fold(step.nodes)}",
        f"--ntasks={count * step.tasks_per_node}",
        f"--ntasks-per-node={step.tasks_per_node}",
        f"--cpus-per-task={step.cpus}",
        "--distribution=block",
        "--overlap",
        "--mpi=none",
        "--export=ALL",
        "--chdir=/",
        "--no-kill",
        f"--kill-on-bad-exit={int(step.together)}",
        f"--wait={step.patience + _BACKSTOP if step.patience else 0}",
    ]
    if step.image is not None:
        argv.append(f"--container-image={step.image}")
        if step.mounts:
            argv.append(f"--container-mounts={','.join(step.mounts)}")
        argv.append("--no-container-mount-home")
    return [*argv, *program]


def starter(bootstrap: str, phase: str, pythons: Sequence[str]) -> list[str]:
    """The program of a step: any Python that is new enough, then the bootstrap program."""
    names = list(dict.fromkeys([*pythons, *PYTHONS]))
    return ["/bin/sh", "-c", STARTER, "stager", bootstrap, phase, *names]


def broadcast_argv(source: str, target: str, step_id: str, fanout: int) -> list[str]:
    """The command that copies a file to the nodes of a step.

    It is compressed already; and an existing file is replaced, as names are the job's own.
    """
    return [
        "sbcast",
        "--force",
        "--compress=none",
        f"-F{fanout}",
        f"--jobid={step_id}",
        source,
        target,
    ]


def fanout(nodes: int, version: tuple[int, int]) -> int:
    """How many nodes each sender of a broadcast passes a block on to, for it to take least time.

    ``sbcast`` takes at most 8 up to 23.02, and 64 from 23.11 on (MAX_THREADS in file_bcast.c).
    """
    return forecast.best_width(nodes, 64 if version >= (23, 11) else forecast.WIDEST)


def version(text: str) -> tuple[int, int]:
    """What ``srun --version`` says: ``slurm-wlm 22.05.8`` is (22, 5); (0, 0) if unknown."""
    found = _VERSION.search(text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def step_faults(stderr: str) -> dict[str, str]:
    """Which nodes a step went wrong on, and how, from what ``srun`` wrote to standard error.

    Once one task has failed ``srun`` ends the others: of these it is said that they follow. They
    are told in the order in which they came, so the first is the one to blame.
    """
    found: dict[str, str] = {}
    for line in stderr.splitlines():
        lost = _LOST.search(line)
        if lost:
            for node in _hosts(lost[1]):
                found[node] = "Slurm lost the node (node failure)"
            continue
        launch = _LAUNCH.search(line)
        if launch:
            found.setdefault(launch[1], f"{_NO_START} ({launch[2].strip()})")
            continue
        task = _TASK.match(line)
        if task:
            for node in _hosts(task[1]):
                found.setdefault(node, f"task {task[2]}: {task[3].strip()}")
    first = next(iter(found), "")
    return {
        node: f"srun ended it, as {first} had failed"
        if node != first and _TAKEN_ALONG.match(text)
        else text
        for node, text in found.items()
    }


def ended_tasks(stderr: str) -> dict[str, set[int]]:
    """Return each node's tasks that have ended otherwise than well, as ``srun`` wrote of them.

    One line may be about several nodes with as many tasks each, in their order; where the numbers
    do not say which task is whose, none is returned.
    """
    found: dict[str, set[int]] = {}
    for line in stderr.splitlines():
        task = _TASK.match(line)
        if task is None:
            continue
        nodes, numbers = _hosts(task[1]), _hosts(f"[{task[2]}]")
        each, rest = divmod(len(numbers), max(1, len(nodes)))
        for at, node in enumerate(nodes if not rest else ()):
            own = map(int, numbers[at * each : (at + 1) * each])
            found.setdefault(node, set()).update(own)
    return found


def controller_fault(stderr: str) -> str:
    """Why a command got no word from Slurm's controller; empty where it had one, or began."""
    found = _CONTROLLER.search(stderr)
    return found["fault"].strip() if found else ""


def not_created(stderr: str) -> bool:
    """Whether the controller refused a step: nothing of it has begun."""
    return "Unable to create step for job" in stderr


def network_fault(fault: str) -> bool:
    """Whether what a command of Slurm's says of a node is about the way there, not its disk."""
    return bool(_NETWORK.search(fault))


def unreachable(fault: str) -> bool:
    """Whether a fault of :func:`step_faults` says that the node itself cannot be used."""
    return fault.startswith((_NO_START, "Slurm lost the node"))


def fault_code(fault: str, otherwise: int) -> int:
    """The exit status that a fault speaks of, negative for a signal; else the step's own."""
    exited = _EXITED.search(fault)
    if exited:
        return int(exited[1])
    signals = {"Killed": -9, "Terminated": -15, "srun ended it": -9}
    return next((code for word, code in signals.items() if word in fault), otherwise)


def advice(node: str, fault: str) -> str:
    """What to do about a node on which a step went wrong; empty where its log says it."""
    if not fault.startswith("Slurm ") and "create step" not in fault:
        return ""
    return f"see whether it is up (sinfo -N -n {node}), or leave it out with --exclude={node}"


def lost_advice(node: str) -> str:
    """What to do about a node that cannot be reached any more."""
    return (
        f"see whether it is up and its network works (sinfo -N -n {node}, ping {node}), or leave "
        f"it out with --exclude={node}"
    )


def down_nodes(listed: str) -> dict[str, str]:
    """The nodes on which nothing can be started, and their states.

    Args:
        listed: what ``sinfo --Node --noheader --format "%N %T"`` prints; a node may come twice.
    """
    found = dict(line.split()[:2] for line in listed.splitlines() if len(line.split()) > 1)
    return {node: state for node, state in found.items() if state.startswith(_DOWN)}


def broadcast_faults(stderr: str) -> dict[str, str]:
    """Which nodes ``sbcast`` failed on, and how, from what it wrote to standard error."""
    found: dict[str, str] = {}
    for line in stderr.splitlines():
        match = _BROADCAST.search(line)
        if match:
            for node in _hosts(match[1]):
                found.setdefault(node, match[2].strip())
    return found


def ended_by(shown: str, attempt: int = 0, said: str = "") -> str:
    """Why a job ended; empty while it runs on.

    Args:
        shown: what ``scontrol --oneliner show job`` says.
        attempt: how often the job had been started before this time.
        said: what ``srun`` wrote to standard error. Of a job that goes back into the queue the
            controller has forgotten already that it was preempted (seen with 22.05).
    """
    fields = dict(re.findall(r"\b(JobState|Reason|PreemptTime|Restarts)=(\S*)", shown))
    state, reason = fields.get("JobState", ""), fields.get("Reason", "")
    if state == "COMPLETING":  # what it will be called is only in the reason as yet
        if reason in ("TimeLimit", "NodeDown"):
            return {"TimeLimit": "time-limit", "NodeDown": "node-failure"}[reason]
        if fields.get("PreemptTime", "None") != "None" or "DUE TO PREEMPTION" in said:
            return "preempted"
        restarts = fields.get("Restarts", "")
        again = restarts.isdigit() and int(restarts) > attempt
        return "requeued" if again else "cancelled"
    return {
        "TIMEOUT": "time-limit",
        "DEADLINE": "time-limit",
        "NODE_FAIL": "node-failure",
        "PREEMPTED": "preempted",
        "CANCELLED": "cancelled",
        "REVOKED": "cancelled",
    }.get(state, "")


def step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables for a command of ours: options for other commands of the user's are dropped."""
    return {name: value for name, value in env.items() if not _OWN_OPTIONS.match(name)}


def _hosts(text: str) -> list[str]:
    try:
        return expand_hostlist(text)
    except NodeError:
        return []
