"""The enumerations that both sides share: what a job is asked to do, and how it ended."""

from __future__ import annotations

import enum

EXIT_JOB = 3  # exit status of a job that failed, on a node or in a rank
EXIT_INTERRUPTED = 130  # exit status that a shell gives a command ended by Ctrl-C


class TextEnum(str, enum.Enum):
    """An enumeration of texts; a member prints, and goes into JSON, as its value."""

    def __str__(self) -> str:
        return str(self.value)


class Action(TextEnum):
    """The purpose of a job."""

    VERIFY = "verify"
    RUN = "run"
    CLEAN = "clean"


class Allocation(TextEnum):
    """The place where a job's nodes come from."""

    LOCAL = "local"  # processes on this machine
    SLURM = "slurm"  # nodes of a Slurm allocation
    SSH = "ssh"  # hosts that are reached over OpenSSH


class Launcher(TextEnum):
    """The program that starts the ranks."""

    TORCHRUN = "torchrun"
    SRUN = "srun"
    PROCESSES = "processes"


class CompileCache(TextEnum):
    """What is done with code that ``torch.compile`` and Triton have made on nodes."""

    AUTO = "auto"  # it is brought back, and used by later jobs on nodes of the same kind
    READ = "read"  # what earlier jobs have left is used, and nothing is brought back
    OFF = "off"


class Backend(TextEnum):
    """The backend of torch.distributed."""

    AUTO = "auto"  # ``nccl`` where every node has a GPU, else ``gloo``
    GLOO = "gloo"
    NCCL = "nccl"


class TransferWay(TextEnum):
    """The way in which nodes get the bundle."""

    AUTO = "auto"  # read where it lies if that is quicker; else sent, by a relay if possible
    RELAY = "relay"  # sent: each node passes it on to others
    SBCAST = "sbcast"  # sent by Slurm's ``sbcast``
    SHARED = "shared"  # read where it lies


class Stage(TextEnum):
    """The rule by which the bundle is sent to nodes."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class LogMode(TextEnum):
    """The readers of a job's files."""

    PRIVATE = "private"  # its user alone
    GROUP = "group"  # also the group of the log directory


class PhaseName(TextEnum):
    """A step of a job that its driver takes with all nodes, or asks of their agents."""

    PREFLIGHT = "preflight"
    PLACE = "place"
    UNPACK = "unpack"
    PROBE = "probe"
    DEEP = "deep"
    ALL_REDUCE = "all_reduce"
    LAUNCH = "launch"
    COLLECT = "collect"
    TIDY = "tidy"
    CLEAN = "clean"
    SESSION = "session"  # phases that one agent is asked for one after the other


class Ending(TextEnum):
    """The reason why Slurm ended an allocation."""

    TIME_LIMIT = "time-limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    NODE_FAILURE = "node-failure"


class FailureClass(TextEnum):
    """The class of a failure, as ``stager diagnose`` reports it; in the documentation's order."""

    PYTHON_ERROR = "python-error"
    OUT_OF_MEMORY = "out-of-memory"
    KILLED = "killed"
    PORT = "port"
    RENDEZVOUS = "rendezvous"
    INTERFACE = "interface"
    NAME_RESOLUTION = "name-resolution"
    MISSING_ASSET = "missing-asset"
    MISSING_MODULE = "missing-module"
    DAMAGED_COPY = "damaged-copy"
    DISK_FULL = "disk-full"
    TIME_LIMIT = "time-limit"
    PREEMPTION = "preemption"
    NODE_FAILURE = "node-failure"
    HANG = "hang"
    ENVIRONMENT = "environment"
    UNKNOWN = "unknown"


class Retry(TextEnum):
    """Whether a job that failed may succeed if it is run again as it is."""

    YES = "yes"  # the failure is not the program's: a node, the network, a preemption
    ONCE = "once"  # not known whose it is: a second time at the same place shows it
    NO = "no"  # the program, its arguments, its settings or the bundle have to change


class NodeFault(TextEnum):
    """A kind of failure that is a node's, and not the job's or the program's."""

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
        return _FAULT_WORDS.get(self, self.value.replace("-", " "))


_FAULT_WORDS = {
    NodeFault.NO_DIRECTORY: "no usable directory",
    NodeFault.NO_INTERPRETER: "no suitable Python",
    NodeFault.INTERFACE: "no such network interface",
    NodeFault.NETWORK: "not reachable by network",
    NodeFault.PORT: "no free port",
    NodeFault.CLOCK: "wrong clock",
}
