"""The errors of Slurm's commands, by node: what each of them means for a job. Pure functions."""

from __future__ import annotations

import re
import signal

from ...protocol.problem import NodeError, ProblemCode
from ...system import signals
from ...system.hostlist import expand_hostlist
from ...system.processes import describe_exit
from .step_faults import StepFault

UNREACHABLE = (ProblemCode.NO_ANSWER_NO_START, ProblemCode.NO_ANSWER_NODE_FAILURE)
"""The problems of nodes that cannot be used themselves."""
_TASK = re.compile(r"srun: error: (\S+?): tasks? ([\d,-]+): (.+)")
_LAUNCH = re.compile(r"Task launch for \S+ failed on node (\S+?): (.+)")
_LOST = re.compile(r"Node failure on (\S+)")
_EXITED = re.compile(r"Exited with exit code (\d+)$")
_BROADCAST = re.compile(r"sbcast: error: REQUEST_FILE_BCAST\((\S+?)\): (.+)")
_CONTROLLER = re.compile(
    r"(?:Unable to (?:confirm allocation for|create step for) job \S+|Job step creation failed"
    r"|Slurm job (?:ID )?\S+ lookup error|Unable to allocate resources): "
    r"(?P<fault>Unable to contact slurm controller.*|Socket timed out on send/recv.*"
    r"|Zero Bytes were transmitted or received|Message (?:receive|send) failure"
    r"|Communication (?:connection|shutdown) failure|.*(?:standby mode|temporarily disabled).*)"
)
"""Errors of a command that could not even ask; nothing of what it was to begin has begun."""
_NETWORK = re.compile(
    r"Communication (?:connection|shutdown) failure|timed out|Connection (?:refused|reset)"
    r"|unreachable|No route|(?:receive|send) failure|Zero Bytes|find an address|not responding"
)
TOLD_TO_END = (signals.TERMINATED, -signal.SIGTERM)
"""Exit statuses of an agent that was ended for a rank of another node."""
_SIGNALS = {"Killed": -9, "Terminated": -15}
"""Exit status of a task that a signal ended, by Slurm's word for it."""


def step_faults(stderr: str) -> dict[str, StepFault]:
    """Return the nodes that a step went wrong on, and how, as ``srun`` wrote to standard error.

    Once one task has failed ``srun`` ends the others: those are consequences. Faults
    are reported in the order in which they came, so the first is the one to blame, unless SIGTERM
    has ended it, and not all.
    """
    faults: dict[str, StepFault] = {}
    for line in stderr.splitlines():
        _add_faults(line, faults)
    first = next((node for node in faults if faults[node].status not in TOLD_TO_END), "")
    first = first or next(iter(faults), "")
    for node, fault in faults.items():
        if node != first and fault.status in (*TOLD_TO_END, _SIGNALS["Killed"]):
            follows = ProblemCode.NO_ANSWER_FOLLOWED
            faults[node] = StepFault(follows, {"first": first}, _SIGNALS["Killed"])
    return faults


def _add_faults(line: str, faults: dict[str, StepFault]) -> None:
    """Add the faults of nodes in one line; the first for a node counts, except for its loss."""
    lost = _LOST.search(line)
    if lost:
        failure = StepFault(ProblemCode.NO_ANSWER_NODE_FAILURE, {})
        faults.update(dict.fromkeys(_hosts(lost[1]), failure))
        return
    launch = _LAUNCH.search(line)
    if launch:
        no_start = StepFault(ProblemCode.NO_ANSWER_NO_START, {"why": launch[2].strip()})
        faults.setdefault(launch[1], no_start)
        return
    task = _TASK.match(line)
    if task:
        for node in _hosts(task[1]):
            faults.setdefault(node, _task_fault(task[2], task[3].strip()))


def _task_fault(numbers: str, words: str) -> StepFault:
    values = {"why": f"task {numbers}: {words}"}
    exited = _EXITED.search(words)
    if exited:
        return StepFault(ProblemCode.NO_ANSWER_EXITED, values, int(exited[1]))
    killed = words == "Killed"
    problem = ProblemCode.NO_ANSWER_KILLED if killed else ProblemCode.NO_ANSWER
    return StepFault(problem, values, _SIGNALS.get(words))


def general_fault(code: int, stderr: str) -> StepFault:
    """Return the fault of a node of which Slurm has said nothing: that of its whole step."""
    last_lines = [line for line in stderr.splitlines() if line.strip()][-3:]
    why = "; ".join([describe_exit(code), *last_lines])
    problem = ProblemCode.NO_ANSWER
    if "create step" in why:
        problem = ProblemCode.NO_ANSWER_NO_STEP
    elif _EXITED.search(why):
        problem = ProblemCode.NO_ANSWER_EXITED
    elif why.endswith(": Killed"):
        problem = ProblemCode.NO_ANSWER_KILLED
    return StepFault(problem, {"why": why})


def ended_tasks(stderr: str) -> dict[str, set[int]]:
    """Return each node's tasks that have failed, as ``srun`` reported.

    One line may be about several nodes with as many tasks each, in their order; where the numbers
    do not say which task is whose, none is returned.
    """
    ended: dict[str, set[int]] = {}
    for line in stderr.splitlines():
        task = _TASK.match(line)
        if task is None:
            continue
        nodes, numbers = _hosts(task[1]), _hosts(f"[{task[2]}]")
        each, rest = divmod(len(numbers), max(1, len(nodes)))
        if rest:
            continue
        for position, node in enumerate(nodes):
            own = map(int, numbers[position * each : (position + 1) * each])
            ended.setdefault(node, set()).update(own)
    return ended


def broadcast_faults(stderr: str) -> dict[str, str]:
    """Return the nodes that ``sbcast`` failed on, and how, as it wrote to standard error."""
    faults: dict[str, str] = {}
    for line in stderr.splitlines():
        match = _BROADCAST.search(line)
        if match:
            for node in _hosts(match[1]):
                faults.setdefault(node, match[2].strip())
    return faults


def controller_fault(stderr: str) -> str:
    """Return why Slurm's controller did not answer a command; empty where it did, or one began."""
    match = _CONTROLLER.search(stderr)
    return match["fault"].strip() if match else ""


def not_created(stderr: str) -> bool:
    """Return whether the controller refused a step: nothing of it has begun."""
    return "Unable to create step for job" in stderr


def is_of_new_controller(stderr: str) -> bool:
    """Return whether the controller refused a step as it knows nothing of the nodes' memory yet.

    Our steps ask for none. Since 23.11 ``scontrol reconfigure`` starts another ``slurmctld``, and
    until nodes have registered there it refuses steps so (seen with 24.11).
    """
    return not_created(stderr) and "Memory required by task is not available" in stderr


def network_fault(fault: str) -> bool:
    """Return whether a fault that Slurm reports of a node is about the network, not its disk."""
    return bool(_NETWORK.search(fault))


def _hosts(text: str) -> list[str]:
    try:
        return expand_hostlist(text)
    except NodeError:
        return []
