"""Slurm is text: its command lines, and the parsers of its output and errors."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ...protocol.enumerations import Action, Ending, Launcher
from ...protocol.job import Job, check_job
from ...protocol.problem import NodeError, Problem, ProblemCode
from ...regex import compile_lazily
from ...system.hostlist import expand_hostlist, fold_hosts, parse_counts
from ...system.processes import describe_exit
from .. import forecast
from .transport import TOLD_TO_END, Ended, Step

_TASK = compile_lazily(r"srun: error: (\S+?): tasks? ([\d,-]+): (.+)")
_LAUNCH = compile_lazily(r"Task launch for \S+ failed on node (\S+?): (.+)")
_LOST = compile_lazily(r"Node failure on (\S+)")
_EXITED = compile_lazily(r"Exited with exit code (\d+)$")
_BROADCAST = compile_lazily(r"sbcast: error: REQUEST_FILE_BCAST\((\S+?)\): (.+)")
CONTROLLER_FAULTS: Mapping[str, bool] = {
    r"Unable to contact slurm controller \(connect failure\)": True,
    "Unable to contact slurm controller": False,
    "in standby mode": True,
    "Socket timed out on send/recv": False,
    "Zero Bytes were transmitted or received": False,
    "Message (?:receive|send) failure": False,
    "Communication (?:connection|shutdown) failure": False,
    "temporarily disabled": False,
}
"""Slurm's words where its controller did not answer, and whether a request cannot have reached it.
After a time-out or a truncated answer, it may have."""
_CONTROLLER = compile_lazily(
    r"(?:Unable to (?:confirm allocation for|create step for) job \S+|Job step creation failed"
    r"|Slurm job (?:ID )?\S+ lookup error|Unable to allocate resources): "
    rf"(?P<fault>.*(?:{'|'.join(CONTROLLER_FAULTS)}).*)"
)  # errors of a command that could not even ask; nothing of what it was to begin has begun
NETWORK_FAULT = compile_lazily(
    r"Communication (?:connection|shutdown) failure|timed out|Connection (?:refused|reset)"
    r"|unreachable|No route|(?:receive|send) failure|Zero Bytes|find an address|not responding"
)  # a fault of a node that is of the network, not of its disk
_KILLED = -9
_SIGNALS = {"Killed": _KILLED, "Terminated": -15}  # exit statuses by Slurm's words


def parse_step_faults(stderr: str) -> dict[str, Ended]:
    """Return the nodes that a step went wrong on, and how, as ``srun`` wrote to standard error.

    Once one task has failed ``srun`` ends the others: the first is to blame, unless SIGTERM has
    ended it, and not all.
    """
    faults: dict[str, Ended] = {}
    for line in stderr.splitlines():
        if lost := _LOST.search(line):  # it counts, whatever came before
            failure = Ended(ProblemCode.NO_ANSWER_NODE_FAILURE, {})
            faults.update(dict.fromkeys(_expand_hosts(lost[1]), failure))
        elif launch := _LAUNCH.search(line):
            no_start = Ended(ProblemCode.NO_ANSWER_NO_START, {"why": launch[2].strip()})
            faults.setdefault(launch[1], no_start)
        elif task := _TASK.match(line):
            for node in _expand_hosts(task[1]):
                faults.setdefault(node, _describe_task(task[2], task[3].strip()))
    _mark_consequences(faults)
    return faults


def _mark_consequences(faults: dict[str, Ended]) -> None:
    blamed = [node for node, fault in faults.items() if fault.code not in TOLD_TO_END]
    first = next(iter([*blamed, *faults]), "")
    for node, fault in faults.items():
        if node != first and fault.code in (*TOLD_TO_END, _KILLED):
            faults[node] = Ended(ProblemCode.NO_ANSWER_FOLLOWED, {"first": first}, _KILLED)


def _describe_task(numbers: str, words: str) -> Ended:
    exited = _EXITED.search(words)
    code = int(exited[1]) if exited else _SIGNALS.get(words)
    return Ended(_classify_end(words), {"why": f"task {numbers}: {words}"}, code)


def _classify_end(words: str) -> ProblemCode:
    if _EXITED.search(words):
        return ProblemCode.NO_ANSWER_EXITED
    killed = words == "Killed" or words.endswith(": Killed")
    return ProblemCode.NO_ANSWER_KILLED if killed else ProblemCode.NO_ANSWER


def general_fault(code: int, stderr: str) -> Ended:
    """Return the fault of a node of which Slurm has said nothing: that of its whole step."""
    last_lines = [line for line in stderr.splitlines() if line.strip()][-3:]
    why = "; ".join([describe_exit(code), *last_lines])
    is_refused = "create step" in why
    return Ended(ProblemCode.NO_ANSWER_NO_STEP if is_refused else _classify_end(why), {"why": why})


def parse_failed_tasks(stderr: str) -> dict[str, set[int]]:
    """Return each node's tasks that ``srun`` reports as failed, except in ambiguous lines."""
    ended: dict[str, set[int]] = {}
    for task in filter(None, map(_TASK.match, stderr.splitlines())):
        nodes, numbers = _expand_hosts(task[1]), _expand_hosts(f"[{task[2]}]")
        each, rest = divmod(len(numbers), max(1, len(nodes)))
        for position, node in enumerate([] if rest else nodes):
            own = map(int, numbers[position * each : (position + 1) * each])
            ended.setdefault(node, set()).update(own)
    return ended


def parse_broadcast_faults(stderr: str) -> dict[str, str]:
    """Return the nodes that ``sbcast`` failed on, and how, as it wrote to standard error."""
    found = filter(None, map(_BROADCAST.search, stderr.splitlines()))
    faults = [(node, match[2].strip()) for match in found for node in _expand_hosts(match[1])]
    return dict(reversed(faults))  # the first of a node counts


def controller_fault(stderr: str) -> str:
    """Return why Slurm's controller did not answer a command; empty where it did, or one began."""
    match = _CONTROLLER.search(stderr)
    return match["fault"].strip() if match else ""


def is_step_refused(stderr: str) -> bool:
    """Return whether the controller refused a step: nothing of it has begun."""
    return "Unable to create step for job" in stderr


def is_controller_new(stderr: str) -> bool:
    """Return whether the controller refused a step as it knows nothing of the nodes' memory yet.

    Since 23.11 ``scontrol reconfigure`` starts another ``slurmctld``, which refuses steps so until
    nodes have registered (seen with 24.11).
    """
    return is_step_refused(stderr) and "Memory required by task is not available" in stderr


def _expand_hosts(text: str) -> list[str]:
    with suppress(NodeError):
        return expand_hostlist(text)
    return []


PATIENCE = 600
"""Seconds that the others get once the first node has ended well; ``SLURM_WAIT`` is the user's own.
A rank may be saving a large model. The driver counts: ``srun --wait`` does not name what it kills.
"""
_BACKSTOP = 30  # seconds until ``srun`` kills them, should an agent not answer any more

CREDENTIALS = ("SLURM_JWT",)  # for Slurm's commands where munge is not used; not for ranks

_OWN_OPTIONS = compile_lazily(
    r"SLURM_(LABELIO|UNBUFFEREDIO|STD(IN|OUT|ERR)MODE|OPEN_MODE|EXPORT_ENV|MPI_TYPE|WAIT"
    r"|KILL_BAD_EXIT|DISTRIBUTION|CPU_BIND\w*|MEM_BIND\w*|NTASKS\w*|NPROCS|TASKS_PER_NODE"
    r"|CPUS_PER_TASK|TRES_PER_TASK|THREADS_PER_CORE|HINT|EXACT|OVERLAP|OVERCOMMIT|PROLOG|EPILOG"
    r"|TASK_PROLOG|TASK_EPILOG|WORKING_DIR|STEP\w*|DEBUG|TEST_EXEC|IMMEDIATE|NO_KILL|TIMELIMIT"
    r"|SRUN_\w+|MULTI_PROG|PTY\w*|JOB_NAME)$|SRUN_\w+$"
)  # variables that ``srun`` takes for options, and that would change what a step of ours does

_DOWN = ("down", "fail", "unknown", "powered_down", "powering_down")
_VERSION = compile_lazily(r"(\d+)\.(\d+)")
_SUBMITTED = compile_lazily(r"(?:\bSubmitTime=|\|)(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_JOB_FIELDS = compile_lazily(r"\b(JobState|Reason|PreemptTime|Restarts)=(\S*)")
ENDED_BY_STATE = {
    "TIMEOUT": Ending.TIME_LIMIT,
    "DEADLINE": Ending.TIME_LIMIT,
    "NODE_FAIL": Ending.NODE_FAILURE,
    "BOOT_FAIL": Ending.NODE_FAILURE,
    "PREEMPTED": Ending.PREEMPTED,
    "CANCELLED": Ending.CANCELLED,
    "REVOKED": Ending.CANCELLED,
}  # the states of jobs that Slurm has ended (``man squeue``, job state codes)
_NO_MORE_STEPS = "Job/step already completing or completed"
_ENDED_BY_REASON = {"TimeLimit": Ending.TIME_LIMIT, "NodeDown": Ending.NODE_FAILURE}
_SRUN_PORTS = compile_lazily(r"^SrunPortRange\s*=\s*(\d+)-(\d+)\s*$", re.MULTILINE)


def bind_allocation(job: Job, env: Mapping[str, str]) -> Job:
    """Return a job with its allocation: id, nodes, and how often it was started before."""
    job_id, listed = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
    if not job_id or not listed:
        raise NodeError(Problem(ProblemCode.NO_ALLOCATION, ""))
    nodes = expand_hostlist(listed)
    least, most = job.wanted or (1, len(nodes) - job.spares)
    least = job.min_nodes or least
    if min(len(nodes), most) < least:
        least += 0 if job.wanted else job.spares
        values = {"job": job_id, "nodes": str(len(nodes)), "least": str(least)}
        raise NodeError(Problem(ProblemCode.TOO_FEW_NODES, "", values))
    restarts = env.get("SLURM_RESTART_COUNT", "0")
    attempt = int(restarts) if restarts.isdigit() else 0
    used = tuple(nodes[: most + job.spares])
    spares = max(0, len(used) - most)  # an allocation that stands may have fewer
    bound = replace(job, id=job_id, nodes=used, attempt=attempt, spares=spares)
    try:
        check_job(bound)
    except ValueError as exc:
        raise NodeError(Problem(ProblemCode.ALLOCATION_UNUSABLE, "", {"why": str(exc)})) from exc
    _refuse_few_cpus(bound, env)
    return bound


def _refuse_few_cpus(job: Job, env: Mapping[str, str]) -> None:  # Slurm would create no step
    counts = parse_counts(env.get("SLURM_JOB_CPUS_PER_NODE", ""))[: len(job.nodes)]
    ranks = job.launch.nproc_per_node or 1
    by_slurm = job.action is Action.RUN and job.launch.launcher is Launcher.SRUN
    asked = max(job.cpus_per_task or 1, ranks if by_slurm else 1)
    fewest = min(counts, default=asked)
    if fewest < asked:
        setting = "cpus-per-task" if asked == job.cpus_per_task else "nproc-per-node"
        values = {"job": job.id, "cpus": str(fewest), "asked": str(asked), "setting": setting}
        raise NodeError(Problem(ProblemCode.TOO_FEW_CPUS, "", values))


def read_patience(env: Mapping[str, str]) -> int:
    """Return the seconds that nodes may go on after the first has ended well; 0: no limit."""
    seconds = env.get("SLURM_WAIT", "")
    return int(seconds) if seconds.isascii() and seconds.isdigit() else PATIENCE


def make_step_argv(step: Step, program: Sequence[str]) -> list[str]:
    """Return the command that runs a program on each node of a step.

    ``--cpus-per-task`` is given because some versions do not inherit it (22.05, 23.02).
    """
    count = len(step.nodes)
    argv = [
        "srun",
        f"--job-name=stager-{step.phase}",
        f"--nodes={count}",
        f"--nodelist={fold_hosts(step.nodes)}",
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


def make_broadcast_argv(source: str, target: str, step_id: str, fanout: int) -> list[str]:
    """Return the command that copies a file, which is compressed, to the nodes of a step."""
    options = ("--force", "--compress=none", f"-F{fanout}", f"--jobid={step_id}")
    return ["sbcast", *options, source, target]


def choose_fanout(nodes: int, version: tuple[int, int]) -> int:
    """Return the quickest fan-out of a broadcast: at most 8, or 64 from 23.11 on (file_bcast.c)."""
    return forecast.best_width(nodes, 64 if version >= (23, 11) else forecast.WIDEST)


def parse_version(text: str) -> tuple[int, int]:
    """Parse ``srun --version``: ``slurm-wlm 22.05.8`` is (22, 5); (0, 0) if unknown."""
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_srun_ports(shown: str) -> range | None:
    """Return the ports that ``srun`` may use, by ``scontrol show config``; None for any."""
    match = _SRUN_PORTS.search(shown)
    first, last = map(int, match.groups()) if match else (0, 0)
    return range(first, last + 1) if 0 < first <= last else None


def make_states_argv(nodes: Iterable[str]) -> list[str]:
    """Return the command that lists the states of nodes, for :func:`parse_down_nodes`."""
    return ["sinfo", "--Node", "--noheader", "--format=%N %T", f"--nodes={','.join(nodes)}"]


def parse_down_nodes(listed: str) -> dict[str, str]:
    """Return unusable nodes and their states, from ``sinfo``; it repeats one per partition."""
    rows = [line.split() for line in listed.splitlines()]
    states = {row[0]: row[1] for row in rows if len(row) > 1}
    return {
        node: state
        for node, state in states.items()
        if state.startswith(_DOWN) or state.endswith("*")  # does not respond, see sinfo(1)
    }


def parse_submit_time(shown: str) -> float | None:
    """Parse ``scontrol show job`` or ``sacct -P -o State,Submit``; seconds since the epoch."""
    found = _SUBMITTED.search(shown)
    return time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) if found else None


def parse_job_ending(shown: str, attempt: int = 0, stderr: str = "") -> Ending | None:
    """Return why a job ended, None while it runs; Slurm 22.05 forgets preemption, stderr has it."""
    fields = dict(_JOB_FIELDS.findall(shown))
    state = fields.get("JobState", "")
    if state == "RUNNING" and _NO_MORE_STEPS in stderr:
        # From its EndTime on a job gets no steps (ESLURM_ALREADY_DONE in step_mgr.c), while Slurm
        # looks for jobs to end every 30 s only.
        return Ending.TIME_LIMIT
    if state != "COMPLETING":
        return ENDED_BY_STATE.get(state)
    # The state that it will have is only in the reason as yet.
    reason = fields.get("Reason", "")
    if reason in _ENDED_BY_REASON:
        return _ENDED_BY_REASON[reason]
    if fields.get("PreemptTime", "None") != "None" or "DUE TO PREEMPTION" in stderr:
        return Ending.PREEMPTED
    restarts = fields.get("Restarts", "")
    requeued = restarts.isdigit() and int(restarts) > attempt
    return Ending.REQUEUED if requeued else Ending.CANCELLED


def make_step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a command of ours, without options for the user's own commands."""
    return {name: value for name, value in env.items() if not _OWN_OPTIONS.match(name)}
