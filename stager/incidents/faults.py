"""The one table of failures that are a node's, and not the job's or the program's.

Whatever is not in it never counts on a node: an error of the program, its memory, a time limit, a
preemption, an interrupt, a hang, a missing module, a bundle that is damaged itself or is built for
other machines, and everything that happens on the login side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bundle.protocol.enumerations import FailureClass, TextEnum
from bundle.protocol.problem import ProblemCode


class NodeFault(TextEnum):
    """A kind of failure that is a node's."""

    DISK_FULL = "disk-full"
    DISK_FAULT = "disk-fault"
    NO_DIRECTORY = "no-directory"
    NO_INTERPRETER = "no-interpreter"
    INTERFACE = "interface"
    NAME_RESOLUTION = "name-resolution"
    NETWORK = "network"
    PORT = "port"
    CLOCK = "clock"
    DAMAGED_COPY = "damaged-copy"
    NODE_FAILURE = "node-failure"

    @property
    def words(self) -> str:
        """The fault for a person: ``disk full``."""
        return _WORDS.get(self, self.value.replace("-", " "))


_WORDS = {
    NodeFault.NO_DIRECTORY: "no usable directory",
    NodeFault.NO_INTERPRETER: "no suitable Python",
    NodeFault.INTERFACE: "no such network interface",
    NodeFault.NETWORK: "not reachable by network",
    NodeFault.PORT: "no free port",
    NodeFault.CLOCK: "wrong clock",
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The condition on which a problem counts on the node that has it."""

    fault: NodeFault
    """The kind of failure that it is."""
    least_nodes: int
    """The fewest nodes of a job in which it tells something about the node; see below."""


def _alone(fault: NodeFault) -> Rule:
    """Return the rule for what is wrong with a node whatever the job asks of it."""
    return Rule(fault=fault, least_nodes=1)


def _compared(fault: NodeFault) -> Rule:
    """Return the rule for what also depends on what the job asks for.

    An environment may be too large for every node, and a setting wrong for all of them: only
    another node of the same job, which can do it, shows that this one is at fault.
    """
    return Rule(fault=fault, least_nodes=2)


def _between(fault: NodeFault) -> Rule:
    """Return the rule for what goes wrong between two nodes: a third shows whose fault it is."""
    return Rule(fault=fault, least_nodes=3)


PROBLEMS: Mapping[ProblemCode, Rule] = {
    ProblemCode.NO_PLACE_WITH_ROOM: _compared(NodeFault.DISK_FULL),
    ProblemCode.NO_ROOM: _compared(NodeFault.DISK_FULL),
    ProblemCode.ENVIRONMENT_DISK_FULL: _compared(NodeFault.DISK_FULL),
    ProblemCode.INCOMING_DISK_FULL: _compared(NodeFault.DISK_FULL),
    ProblemCode.BUNDLE_NOT_ARRIVED_NO_ROOM: _compared(NodeFault.DISK_FULL),
    ProblemCode.BUNDLE_NOT_SENT_NO_ROOM: _compared(NodeFault.DISK_FULL),
    ProblemCode.PIPES_DISK_FULL: _compared(NodeFault.DISK_FULL),
    ProblemCode.BUNDLE_DISK_FAULT: _compared(NodeFault.DISK_FAULT),
    ProblemCode.NO_PLACE: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.PATH_NOT_EXAMINED: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.NODE_ROOT_REFUSED: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.NODE_ROOT_BASE_REFUSED: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.INCOMING_UNWRITABLE: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.ENVIRONMENT_UNWRITABLE: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.DECOMPRESSOR_UNUSABLE: _compared(NodeFault.NO_DIRECTORY),  # usually noexec
    ProblemCode.NO_PYTHON: _compared(NodeFault.NO_INTERPRETER),
    ProblemCode.NO_CPYTHON: _compared(NodeFault.NO_INTERPRETER),
    ProblemCode.NO_CONTAINER_PROGRAM: _compared(NodeFault.NO_INTERPRETER),
    ProblemCode.IMAGE_UNREADABLE: _compared(NodeFault.NO_DIRECTORY),
    ProblemCode.NO_INTERFACE: _compared(NodeFault.INTERFACE),
    ProblemCode.NO_INTERFACE_WITH_ADDRESS: _compared(NodeFault.INTERFACE),
    ProblemCode.NO_ADDRESS_FOR_OTHERS: _compared(NodeFault.INTERFACE),
    ProblemCode.NAME_UNRESOLVED: _compared(NodeFault.NAME_RESOLUTION),
    ProblemCode.NAMES_UNRESOLVED: _compared(NodeFault.NAME_RESOLUTION),
    ProblemCode.NAMES_LEAD_BACK: _compared(NodeFault.NAME_RESOLUTION),
    ProblemCode.NAMES_DIFFER: _between(NodeFault.NAME_RESOLUTION),
    ProblemCode.NO_ROUTE: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_MUTE: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_REFUSES: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_SILENT: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_UNREACHED: _between(NodeFault.NETWORK),
    ProblemCode.HEAD_REACHED_BY_NONE: _between(NodeFault.NETWORK),
    ProblemCode.BUNDLE_NOT_SENT_NETWORK: _compared(NodeFault.NETWORK),
    ProblemCode.NO_FREE_PORT: _compared(NodeFault.PORT),
    ProblemCode.CLOCK_WRONG: _between(NodeFault.CLOCK),
    ProblemCode.COPY_DAMAGED_TWICE: _compared(NodeFault.DAMAGED_COPY),
    ProblemCode.ENVIRONMENT_DAMAGED: _compared(NodeFault.DAMAGED_COPY),
    ProblemCode.ENVIRONMENT_TAKEN_AWAY: _compared(NodeFault.DAMAGED_COPY),
    ProblemCode.DAMAGE_NOT_REMOVED: _compared(NodeFault.DAMAGED_COPY),
    ProblemCode.NO_ANSWER_NODE_FAILURE: _alone(NodeFault.NODE_FAILURE),
    # Slurm says this also where it cannot lay out the tasks that the job asks for.
    ProblemCode.NO_ANSWER_NO_START: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.NO_ANSWER_UNREACHABLE: _compared(NodeFault.NODE_FAILURE),
    # While the bundle travels: no program of the user has begun by then.
    ProblemCode.NO_ANSWER_SILENT: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.NO_ANSWER_HANGS: _compared(NodeFault.NODE_FAILURE),
    # Where no host can be reached, it is this machine's network, or the user's key.
    ProblemCode.SSH_UNREACHED: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.SSH_TURNED_AWAY: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.SSH_LOGIN_FAILED: _compared(NodeFault.NODE_FAILURE),
    ProblemCode.SSH_CONNECTION_LOST: _compared(NodeFault.NODE_FAILURE),
}
"""By the code of a problem; one that is not here is not the node's."""

RANKS: Mapping[FailureClass, Rule] = {FailureClass.NODE_FAILURE: _alone(NodeFault.NODE_FAILURE)}
"""By the class of a rank's failure: a faulty GPU or memory, but nothing that a program can cause.

A rank's full disk is not here: the file may be on a file system that all nodes share.
"""
