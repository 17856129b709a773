"""The one table of problems: code, words, failure class, remedy, and whether a node is to blame.

A problem travels as its code and its values; both sides read its words from the table.
"""

from __future__ import annotations

import contextlib
import enum
import string
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import NamedTuple

from .dataclass import dataclass
from .enumerations import Ending, FailureClass, NodeFault

# --- The words that several rows share

_MOVE_IT = (
    "name another directory with [cluster] node-root in stager.toml, or with $STAGER_NODE_ROOT"
)
_MEND_OR_MOVE = f"mend that, or {_MOVE_IT}"
_LINK_SETTING = "name the interface with [launch] interface in stager.toml, or with --interface"
_EXCLUDE_WRONG = (
    "build for the nodes with [environment] platform in stager.toml, or exclude this node"
)
_NO_ANSWER = "{phase} gave no answer"
_SEE_LOG = "see its log in {log_dir}"
_SEE_SINFO = "check whether it is up (sinfo -N -n {where}), or leave it out with --exclude={where}"
_LEAVE_OUT = "or leave it out with --exclude={where}"
_TRY_IT = "find out with: ssh -v {where} true"
_REBUILD = "stage it again; if this persists, build the bundle again"
_SEE_SPACE = (
    "check the free space, the inodes and the permissions there, or name another place with "
    "[cluster] node-root or $STAGER_NODE_ROOT"
)
_SEE_PTH = "unset PYTHONPATH and check the environment for .pth files"
_OR_EXCLUDE = "; or leave the node out with --exclude={where}"
_SEE_CODES = "the ranks have ended as their exit codes say; run it again if the logs matter"
_KEPT = "what arrived in full is kept; the rest is still on the node, if the node is up"
_ROOM_THERE = "make room there; {files} still at {source}"


@dataclass(frozen=True, eq=False)
class Row:
    """What is decided for one kind of problem; its words have values, and ``where``, in braces."""

    what: str  # the fault
    why: str = "{why}"  # the finding; empty where the fault says it all
    fix: str = ""  # the remedy
    fault: NodeFault | None = None
    """The fault of the node that has it; None for an error of the program, its memory, a limit, a
    preemption, an interrupt, a hang, a missing module, a damaged bundle, and the login side."""
    failure: FailureClass | None = None  # the class of a job's failure by it; None: as the fault
    least_nodes: int = 2
    """The fewest nodes of a job in which it tells something about the node: 1 whatever the job asks
    for; 2 where another node, which can do it, shows that the job does not ask too much of all; 3
    where it goes wrong between two nodes, and a third shows whose fault it is."""
    follows: bool = False  # true if it follows from another node's problem
    is_unreachable: bool = False  # true if nothing can be started on the node

    @property
    def failure_class(self) -> FailureClass:
        """The class of a job's failure that begins with it."""
        same = (kind for kind in FailureClass if kind.value == self.fault)
        return self.failure or next(same, FailureClass.ENVIRONMENT)


class ProblemCode(enum.Enum):
    """The kinds of problems; ``docs/problems.toml`` has what the words of a row do not say."""

    @property
    def row(self) -> Row:
        """What the table says."""
        return self.value

    @property
    def names(self) -> frozenset[str]:
        """The values that its words need."""
        row = self.row
        parts = string.Formatter().parse(row.what + row.why + row.fix)
        return frozenset(name for _, name, _, _ in parts if name) - {"where"}

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")

    def to_json(self) -> str:
        """Return its code."""
        return str(self)

    @classmethod
    def from_json(cls, raw: object) -> ProblemCode:
        """Read a code; KeyError for one that is not known."""
        return cls[str(raw).upper().replace("-", "_")]

    # A node: its directories.
    PATH_NOT_EXAMINED = Row("cannot be examined", fix=_MOVE_IT, fault=NodeFault.NO_DIRECTORY)
    NO_PLACE = Row(
        "no directory on this node can hold the environment",
        fix=_MEND_OR_MOVE,
        fault=NodeFault.NO_DIRECTORY,
    )
    NO_PLACE_WITH_ROOM = replace(NO_PLACE, fault=NodeFault.DISK_FULL)
    UNSET_VARIABLE = Row(
        "no directory can be chosen for the environment",
        "the variable ${name} is not set on this node",
        _MOVE_IT,
    )
    NODE_ROOT_REFUSED = Row(
        "cannot be used as node root", fix=_MOVE_IT, fault=NodeFault.NO_DIRECTORY
    )
    NODE_ROOT_BASE_REFUSED = Row(
        "cannot hold the node root", fix=_MOVE_IT, fault=NodeFault.NO_DIRECTORY
    )
    NOT_A_NODE_ROOT = Row(
        "cannot be cleaned", "it is not named like a node root of stager", _MOVE_IT
    )
    NOT_REMOVED = Row("cannot be removed", fix="remove {where} by hand, then clean again")
    NOT_REMOVED_MOUNT = Row(
        "cannot be removed",
        "a file system is mounted at {mount}",
        "unmount it (umount {mount}), then clean again",
    )
    # Its Python, processor and C library.
    NO_PYTHON = Row(
        "no Python 3.9 or newer was found",
        "tried {count} names, python3 on PATH among them",
        "install Python there, or leave the node out with --exclude={where}",
        fault=NodeFault.NO_INTERPRETER,
    )
    NO_CPYTHON = Row(
        "there is no CPython {version}, which the bundle was built for",
        "found {listed}",
        "put python{version} on PATH on every node (module load, pyenv or conda), build for the "
        "nodes' version with [environment] python in stager.toml, or let the bundle bring its "
        'Python: interpreter = "bundled" there',
        fault=NodeFault.NO_INTERPRETER,
    )
    NO_CONTAINER_PROGRAM = Row(
        "it has neither apptainer nor singularity",
        "--container-image needs one of them",
        "put one of them on PATH there (module load before the job), or leave the node out with "
        "--exclude={where}",
        fault=NodeFault.NO_INTERPRETER,
    )
    IMAGE_UNREADABLE = Row(
        "the container image cannot be read",
        "{image} does not exist, or this user cannot read it",
        "put the image where every node sees it, such as a shared file system",
        fault=NodeFault.NO_DIRECTORY,
    )
    OTHER_MACHINE = Row(
        "the bundle is for another machine",
        "it is for {needed}, the node is {machine}",
        _EXCLUDE_WRONG,
    )
    OTHER_LIBC = Row(
        "the bundle is for another C library",
        "the node's is {libc}, and the bundle's packages are for {needed}",
        _EXCLUDE_WRONG,
    )
    OLD_LIBC = Row(
        "the node's C library is too old",
        "{package} needs {needed} or newer, the node has {version}",
        _EXCLUDE_WRONG,
    )
    OLD_GPU_DRIVER = Row(
        "has driver {driver}, the bundle's CUDA {cuda} needs {needed} or newer",
        "{package} is built for it",
        "build for the driver with [environment] torch-backend in stager.toml (cu126, cu118), or "
        "leave the node out with --exclude={where}",
    )
    # Its network, names and clock.
    NAME_UNRESOLVED = Row(
        "the name cannot be resolved",
        "{host} says: {why}",
        "add it to DNS or to /etc/hosts on every node",
        fault=NodeFault.NAME_RESOLUTION,
    )
    NO_ROUTE = Row(
        "there is no route to the address",
        "{host} says: {why}",
        f"check that the nodes share a network; {_LINK_SETTING}",
        fault=NodeFault.NETWORK,
        least_nodes=3,
    )
    NO_INTERFACE = Row(
        "this node has no such interface, or it has no address",
        "on {host} there are: {listed}",
        _LINK_SETTING,
        fault=NodeFault.INTERFACE,
    )
    INTERFACE_OF_NO_NODE = Row(
        "no node of the job has the interface that the setting names",
        "none has {names}; on {host} there are: {listed}",
        'name one of the nodes\' own in stager.toml, or with --interface; "auto" takes the route '
        "between them",
        failure=FailureClass.INTERFACE,
    )
    NO_INTERFACE_WITH_ADDRESS = replace(
        NO_INTERFACE, what="no interface has this address", failure=FailureClass.ENVIRONMENT
    )
    NO_ADDRESS_FOR_OTHERS = replace(
        NO_INTERFACE,
        what="this host has no address that other nodes can be given",
        failure=FailureClass.ENVIRONMENT,
    )
    NO_FREE_PORT = Row(
        "none of the {span} ports from {preferred} up can be used",
        "the last error was: {why}",
        "end the processes that earlier jobs left on this node",
        fault=NodeFault.PORT,
    )
    NAMES_UNRESOLVED = Row(
        "names of nodes cannot be resolved",
        "no address for {names}",
        "add them to DNS, or to /etc/hosts on every node",
        fault=NodeFault.NAME_RESOLUTION,
    )
    NAMES_LEAD_BACK = Row(
        "names of nodes resolve to the node itself",
        "{names}",
        "remove them from the loopback lines (127.0.1.1) of /etc/hosts there",
        fault=NodeFault.NAME_RESOLUTION,
    )
    NAMES_DIFFER = replace(
        NAMES_LEAD_BACK,
        what="names of nodes resolve to other addresses than on the other nodes",
        fix="correct /etc/hosts or the DNS cache there",
        least_nodes=3,
    )
    CLOCK_WRONG = Row(
        "the clock is wrong",
        "it is {seconds} s {side} the others (give or take {uncertainty} s)",
        "check its time service (chronyc tracking), or exclude the node",
        fault=NodeFault.CLOCK,
        least_nodes=3,
    )
    HEAD_PORT_TAKEN = Row(
        "the head node cannot listen on the job's port",
        fix="end the processes that earlier jobs left on this node; `ss -tlnp` there names them",
        failure=FailureClass.PORT,
    )
    HEAD_IS_ANOTHER = Row(
        "the head node cannot be reached",
        "from {host}: another program listens there; it answered {answer}",
        "end it, or start the job again",
    )
    HEAD_MUTE = Row(
        "the head node cannot be reached",
        "from {host}: the connection was accepted, but nothing answered within {seconds} s",
        "another program may listen on that port: end it, or start the job again",
        fault=NodeFault.NETWORK,
        least_nodes=3,
    )
    HEAD_REFUSES = replace(
        HEAD_MUTE,
        why="from {host}: refused for {seconds} s: nothing listens there, or a firewall rejects "
        "connections",
        fix="check whether the head node is up, and what its firewall rejects",
    )
    HEAD_SILENT = replace(
        HEAD_MUTE,
        why="from {host}: no answer within {seconds} s, as when a firewall drops packets",
        fix="let the nodes reach one another on ports 61000 to 65535, or name the interface with "
        "[launch] interface in stager.toml",
    )
    HEAD_UNREACHED = replace(
        HEAD_MUTE,
        why="from {host}: {why}",
        fix="check that the nodes share a network; name the interface with [launch] interface",
    )
    HEAD_REACHED_BY_NONE = replace(
        HEAD_MUTE, what="no other node can reach the head node", why="{why}", fix="{fix}"
    )
    HEAD_WITHOUT_ADDRESS = Row(
        "the head cannot be reached",
        "none of its addresses, or none of the job's ports, can be used",
        "name the interface with --interface, or exclude the node",
    )
    # Its answers to the driver.
    NO_ANSWER = Row(_NO_ANSWER, fix=_SEE_LOG, failure=FailureClass.NODE_FAILURE)
    NO_ANSWER_KILLED = replace(NO_ANSWER, failure=FailureClass.KILLED)
    NO_ANSWER_EXITED = replace(NO_ANSWER, failure=FailureClass.ENVIRONMENT)
    NO_ANSWER_FOLLOWED = replace(NO_ANSWER, why="it was ended, as {first} had failed", follows=True)
    NO_ANSWER_NO_STEP = Row(_NO_ANSWER, fix=_SEE_SINFO, failure=FailureClass.NODE_FAILURE)
    NO_ANSWER_NO_START = Row(
        _NO_ANSWER,
        "Slurm cannot start anything there ({why})",
        _SEE_SINFO,
        fault=NodeFault.NODE_FAILURE,
        is_unreachable=True,
    )
    NO_ANSWER_NODE_FAILURE = replace(
        NO_ANSWER_NO_START, why="Slurm lost the node (node failure)", least_nodes=1
    )
    NO_ANSWER_UNREACHABLE = Row(
        _NO_ANSWER,
        "it can no longer be reached: {why}",
        "check whether it is up and its network works (sinfo -N -n {where}, ping {where}), or "
        "leave it out with --exclude={where}",
        fault=NodeFault.NODE_FAILURE,
    )
    NO_ANSWER_DESERTED = replace(
        NO_ANSWER,
        why="nothing of the job runs there any more",
        fix="find out on {where} what ended slurmstepd and the job's processes: `dmesg` lists what "
        "the out-of-memory killer ended; or leave the node out with --exclude={where}",
    )
    NO_ANSWER_SILENT = replace(
        NO_ANSWER_UNREACHABLE,
        why="no message from it for {seconds} s",
        fix="look on {where} for a disk that does not answer (`dmesg`), a process of the job that "
        "is stopped (state T or D in `ps`) and a network that is down; or leave the node out with "
        "--exclude={where}",
    )
    NO_ANSWER_HANGS = replace(
        NO_ANSWER_UNREACHABLE,
        why="its processes have made no progress for {seconds} s: {why}",
        fix="look on {where} for a disk or a file server that does not answer (`dmesg`), and leave "
        "the node out with --exclude={where}",
    )
    # A host that is reached over ssh.
    SSH_UNREACHED = Row(
        "the host cannot be reached over ssh",
        fix=f"check whether it is up and runs sshd (ssh {{where}} true), {_LEAVE_OUT}",
        fault=NodeFault.NODE_FAILURE,
        is_unreachable=True,
    )
    SSH_NAME_UNKNOWN = Row(
        "no host has this name",
        fix="correct it in --hosts, the host file or [cluster] hosts; a name that only ssh knows "
        "belongs into ~/.ssh/config",
        failure=FailureClass.NAME_RESOLUTION,
        is_unreachable=True,
    )
    SSH_NO_LOGIN = Row(
        "the host does not let you in without a password",
        fix="put your key on it (ssh-copy-id {where}), or load it into an agent (ssh-add); "
        "write user@host where your user name there is another one",
        is_unreachable=True,
    )
    SSH_KEY_UNKNOWN = Row(
        "the host's key is not known here, so ssh does not trust it",
        fix="connect to it once by hand and compare the key (ssh {where} true); or let your "
        "administrators publish the keys in /etc/ssh/ssh_known_hosts",
        is_unreachable=True,
    )
    SSH_KEY_CHANGED = Row(
        "the host has another key than it had before",
        fix="ask your administrators whether {where} was installed anew; if so, forget the old "
        "key: ssh-keygen -R {where}",
        is_unreachable=True,
    )
    SSH_TURNED_AWAY = replace(
        SSH_UNREACHED,
        what="the connection was closed before the login",
        fix="see the log of the host's sshd, or of a jump host's in front of it: it takes too few "
        f"logins at a time (MaxStartups), or none of yours (AllowUsers, PAM); {_LEAVE_OUT}",
    )
    SSH_LOGIN_FAILED = replace(
        SSH_UNREACHED, what="the login failed", fix=f"{_TRY_IT}; {_LEAVE_OUT}"
    )
    SSH_CONNECTION_LOST = Row(
        "the ssh connection to the host broke",
        fix=f"check whether it is up (ssh {{where}} uptime), {_LEAVE_OUT}",
        fault=NodeFault.NODE_FAILURE,
    )
    SSH_NOT_STARTED = Row(
        "ssh cannot be started here", fix="install OpenSSH's client, and put ssh on PATH"
    )
    SSH_SAME_HOST = Row(
        "it is the same host as {first}",
        "both have the address {address}",
        "name each host once; the number of ranks on it is --nproc-per-node",
    )
    # The bundle as a file.
    BUNDLE_UNREADABLE = Row(
        "the bundle cannot be read", fix="check the path, or make the bundle with `stager build`"
    )
    BUNDLE_DISK_FAULT = Row(
        "the bundle cannot be read",
        fix="check that disk for errors (dmesg)",
        fault=NodeFault.DISK_FAULT,
    )
    BUNDLE_DAMAGED = Row(
        "the bundle is damaged or not a bundle",
        fix="copy it again, or build it again with `stager build`",
        failure=FailureClass.DAMAGED_COPY,
    )
    STORED_LAYER_UNUSABLE = Row(
        "the bundle refers to a layer in the offline root that cannot be used",
        "{layer}: {why}",
        "build again with `stager build`, which makes the layer; to use a bundle away from its "
        "offline root, write all of it with `stager build --output FILE`",
        failure=FailureClass.DAMAGED_COPY,
    )
    ANOTHER_BUNDLE = Row(
        "this is another bundle than the job was made for",
        "its id is {id}, expected {expected}",
        "stage the right file, or start the job again",
        failure=FailureClass.DAMAGED_COPY,
    )
    SIGNATURE_REFUSED = Row(
        "the bundle's signature is not accepted",
        fix="see whether the signer's key has expired since the job was submitted, and whether the "
        "node's clock is right; then start the job again",
    )
    BUNDLE_OF_OTHER_VERSION = Row(
        "the bundle was made by another version of stager",
        fix="build it again with `stager build`, or use the version that made it",
    )
    NO_ZSTD = Row(
        "this Python has no zstd and the bundle brings none",
        "Python {version}",
        "run the node program with the Python that the bundle was made for",
    )
    DECOMPRESSOR_UNUSABLE = Row(
        "the bundle's zstd decompressor {how}",
        "{name} under Python {version}: {why}",
        "use a node root that allows execution, or build for this machine's platform",
        fault=NodeFault.NO_DIRECTORY,
    )
    PROGRAM_INCOMPLETE = Row("the node program is incomplete", "no source", "build again")
    # The bundle on its way to the nodes.
    BUNDLE_INVISIBLE = Row(
        "the bundle cannot be read there, and staging is off",
        "--stage never lets every node read the bundle where it lies",
        "use --stage auto, or put the offline root on a file system that every node sees",
    )
    NOTHING_TO_SEND = Row(
        "the first node cannot see the bundle, so it cannot be sent to the others",
        "a batch job is driven from its first node",
        "run it from the login node without --batch (it then uses salloc), or put the offline "
        "root on a file system that the nodes see; where a later build has replaced the bundle, "
        "print or submit the script again",
    )
    HOST_DISK_FULL = Row(
        "a disk of the host where the job is driven from is full",
        fix="free some space in {where} on that host, or set TMPDIR to another place",
        failure=FailureClass.DISK_FULL,
    )
    HOST_DISK_UNWRITABLE = Row(
        "a disk of the host where the job is driven from cannot be used",
        fix="look at {where} on that host (full, read-only, failing?), or set TMPDIR to another "
        "place",
    )
    EXCERPT_UNWRITABLE = Row(
        "the part of the bundle that is to be sent cannot be written",
        fix="free some space there, or set TMPDIR to another place",
    )
    EXCERPT_DISK_FULL = replace(EXCERPT_UNWRITABLE, failure=FailureClass.DISK_FULL)
    INCOMING_UNWRITABLE = Row(
        "the bundle cannot be received",
        fix="check the free space and the permissions there",
        fault=NodeFault.NO_DIRECTORY,
    )
    INCOMING_DISK_FULL = replace(INCOMING_UNWRITABLE, fault=NodeFault.DISK_FULL)
    BUNDLE_CUT_OFF = Row(
        "the bundle could not be sent",
        "the rest of it did not arrive",
        "see the problem that is reported first",
    )
    BUNDLE_NOT_ARRIVED = replace(BUNDLE_CUT_OFF, why="{arrived} of {size} bytes had arrived")
    BUNDLE_NOT_ARRIVED_NO_ROOM = replace(
        BUNDLE_CUT_OFF,
        why="{arrived} of {size} bytes had arrived, {free} are free",
        fault=NodeFault.DISK_FULL,
    )
    RELAY_SOURCE_ENDED = Row(
        "the process on {host} that sends the bundle has ended",
        "{why}",
        "start the job again; after SIGKILL, look there for a lack of memory (dmesg)",
        failure=FailureClass.KILLED,
    )
    RELAY_SOURCE_HANGS = Row(
        "the process on {host} that sends the bundle hangs",
        "{why}",
        "look at the file system of {where} on that host: it may not answer at present",
    )
    BUNDLE_NOT_SENT = Row(
        "{file} could not be sent to the node",
        "{way} says: {why}",
        "check the free space and the permissions in {incoming} there" + _OR_EXCLUDE,
    )
    BUNDLE_NOT_SENT_NO_ROOM = replace(BUNDLE_NOT_SENT, fault=NodeFault.DISK_FULL)
    BUNDLE_NOT_SENT_NETWORK = Row(
        "{file} could not be sent to the node",
        "{way} says: {why}",
        "check the network to {where}, with `{check}` for example" + _OR_EXCLUDE,
        fault=NodeFault.NETWORK,
    )
    COPY_DAMAGED_TWICE = Row(
        "the copy of the bundle was damaged on its way, twice",
        fix="the bundle itself is sound: check the network to {where}, and its memory and "
        "disk, or leave the node out with --exclude={where}",
        fault=NodeFault.DAMAGED_COPY,
    )
    # The environment as it is made.
    NO_ROOM = Row(
        "the environment does not fit",
        fix="free some, or name another place with [cluster] node-root or $STAGER_NODE_ROOT",
        fault=NodeFault.DISK_FULL,
    )
    ENVIRONMENT_DISK_FULL = Row(
        "the environment does not fit", fix=_SEE_SPACE, fault=NodeFault.DISK_FULL
    )
    ENVIRONMENT_UNWRITABLE = Row(
        "the environment cannot be written", fix=_SEE_SPACE, fault=NodeFault.NO_DIRECTORY
    )
    LAYER_MISSING = Row(
        "a part of the environment is missing",
        "{name} was to be taken from an older environment, which has changed",
        "start again",
    )
    ENVIRONMENT_GONE = Row(
        "the environment is gone",
        "it was removed, as `stager clean` does with what is not in use",
        "start again",
    )
    UNPACKING_FAILED = Row(
        "an unpacking process failed", "{why}; see its traceback above", "report this with the log"
    )
    UNPACKING_KILLED = Row(
        "an unpacking process was killed",
        "signal {signal}",
        "usually the node ran out of memory; a tmpfs counts as memory too",
        failure=FailureClass.KILLED,
    )
    UNPACKING_ENDED = Row(
        "an unpacking process ended",
        "exit status {status}",
        "see the messages above; usually it received SIGTERM",
    )
    # The environment as it is found.
    ENVIRONMENT_DAMAGED = Row(
        "the environment is damaged",
        fix="remove it with `stager clean --nodes`, then stage it again",
        fault=NodeFault.DAMAGED_COPY,
    )
    ENVIRONMENT_REPAIRED = Row(
        "the environment is damaged",
        fix="stager repairs the environment before using it",
        failure=FailureClass.DAMAGED_COPY,
    )
    ENVIRONMENT_TAKEN_AWAY = replace(
        ENVIRONMENT_DAMAGED,
        fix="it was removed there: the next `stager verify` or `stager run` makes it again",
    )
    DAMAGE_IN_USE = Row(
        "the damaged environment cannot be removed",
        "a job on this node is using it",
        "wait until that job has ended, or end it, and stage again",
        failure=FailureClass.DAMAGED_COPY,
    )
    DAMAGE_NOT_REMOVED = Row(
        "the damaged environment cannot be removed",
        fix="remove {root} there by hand",
        fault=NodeFault.DAMAGED_COPY,
    )
    PYTHON_GARBLED = Row(
        "the environment's Python is not usable", "it answered: {answer}", _REBUILD
    )
    PYTHON_FAILED = Row(
        "the environment's Python does not run",
        fix=f"if it names a shared library, install that on the node; else {_REBUILD}",
    )
    PYTHON_ILLEGAL_INSTRUCTION = Row(
        "the environment's Python does not run",
        fix="this processor lacks instructions that the wheels use; exclude the node",
    )
    PYTHON_KILLED = Row(
        "the environment's Python does not run",
        fix="the node ran out of memory; ask for more with --mem, or exclude the node",
        failure=FailureClass.KILLED,
    )
    LIBRARY_UNUSABLE = Row(
        "the node has no usable copy of this shared library",
        "{why}; needed by {modules} in the environment's Python, and by {importers}",
        "install the package that has it on the node; or build with a Python that brings its "
        'libraries (uv python install, then [environment] interpreter = "bundled"); or exclude the '
        "node",
    )
    PACKAGE_MISSING = Row("the package is missing", "not in {root}", _REBUILD)
    PACKAGE_INCOMPLETE = Row("the package is incomplete", "there is no module {module}", _REBUILD)
    PACKAGE_FOREIGN = Row(
        "the package does not come from the environment", "found in {found}", _SEE_PTH
    )
    MODULE_MISSING = Row("the module is missing", "not found by {python}", _REBUILD)
    MODULE_FOREIGN = Row(
        "the module does not come from the environment", "found in {found}", _SEE_PTH
    )
    MODULE_NOT_IMPORTED = Row(
        "the module cannot be imported",
        fix="run stager exec -- python -c 'import {where}' there to see the whole error",
    )
    # A job: its description and its allocation.
    JOB_OF_OTHER_VERSION = Row(
        "the job description cannot be read",
        fix="start the job with the same version of stager that built the bundle",
    )
    JOB_UNREADABLE = Row("the job description cannot be read", fix="start it again")
    REQUEST_UNREADABLE = Row(
        "the request cannot be read",
        fix="start the job with the same version of stager that built the bundle",
    )
    LOG_DIR_UNWRITABLE = Row(
        "the log directory cannot be written", fix="name another one with --log-dir"
    )
    NO_ALLOCATION = Row(
        "there is no Slurm allocation",
        "SLURM_JOB_ID and SLURM_JOB_NODELIST are not both set",
        "start it with salloc or sbatch, or use --allocation local",
    )
    ALLOCATION_UNUSABLE = Row(
        "the Slurm allocation cannot be used",
        fix="find out what has set SLURM_JOB_ID and SLURM_JOB_NODELIST: the values are not "
        "Slurm's own",
    )
    TOO_FEW_NODES = Row(
        "the allocation has too few nodes",
        "job {job} has {nodes}, and {least} are required",
        "use --nodes {nodes}, or ask Slurm for more",
    )
    TOO_FEW_CPUS = Row(
        "the allocation has too few CPUs",
        "job {job} has {cpus} on a node, and {setting} = {asked} needs {asked}",
        "ask Slurm for more (--cpus-per-task={asked}), or make {setting} smaller in stager.toml",
    )
    NODE_LIST_UNREADABLE = Row(
        "the node list cannot be read", fix="write it as Slurm does, for example n[01-03,07],login1"
    )
    SRUN_NOT_STARTED = Row(
        "srun cannot be started", fix="check whether the allocation still exists"
    )
    AGENT_NOT_STARTED = Row(
        "the agent cannot be started", fix="check the limit of processes (ulimit -u) and the memory"
    )
    RELAY_NOT_STARTED = Row(
        "the relay of the bundle cannot be started",
        fix="the node gets it without the relay; check its addresses (--interface)",
    )
    SLURM_COMMAND_FAILED = Row(
        "{command} failed",
        fix="run it where Slurm's commands are on PATH and the controller answers",
    )
    SENT_LOCALLY = Row("nothing is sent on one machine", "", "use --stage auto")
    FETCHED_LOCALLY = Row("nothing is fetched on one machine", "")
    # A job: its ranks.
    BACKEND_UNUSABLE = Row("the backend cannot be used", fix="use --backend gloo")
    LAUNCHER_NOT_STARTED = Row("the launcher cannot start", fix="stage the environment again")
    PIPES_NOT_MADE = Row(
        "the ranks' pipes cannot be made", fix="check the free space and the inodes there"
    )
    PIPES_DISK_FULL = replace(PIPES_NOT_MADE, fault=NodeFault.DISK_FULL)
    PIPES_OVER_LIMIT = Row(
        "the ranks' pipes cannot be made",
        "{why}: a pipe is needed for {ranks}, and the limit is {limit}",
        "raise the hard limit of open files (ulimit -Hn) on the nodes, or start fewer ranks",
    )
    RANKS_DID_NOT_END = Row(
        "the ranks did not end",
        "other nodes had ended {seconds} s before; a thread, an exit handler or a process pool may "
        "hang",
        "end them before the program ends, or give them longer with SLURM_WAIT=SECONDS",
        failure=FailureClass.HANG,
    )
    RANKS_HANG = Row(
        "the ranks hang",
        "no output for {seconds} s; {why}",
        "mend what keeps that rank, or allow longer silence with [launch] hang-timeout; 0 never "
        "ends the job for it",
        failure=FailureClass.HANG,
    )
    RANKS_CANNOT_TALK = Row(
        "the ranks cannot talk",
        fix="check the network between the nodes (cable, MTU, firewall), name the interface with "
        "[launch] interface in stager.toml, or leave the node out with --exclude",
    )
    NOTHING_MEASURED = Row(
        "the ranks measured nothing",
        "none of their lines begins with {prefix}",
        "see the logs in {log_dir}",
    )
    # A job: its output and its results.
    OUTPUT_LOST = Row(
        "output of {source} is lost",
        "it did not come through srun intact, and was no longer there to be sent again",
        _SEE_CODES,
    )
    OUTPUT_NOT_LOGGED = Row("output of {source} is lost", fix=_SEE_CODES)
    OUTPUT_DISK_FULL = replace(OUTPUT_NOT_LOGGED, failure=FailureClass.DISK_FULL)
    RUN_DIR_MISSING = Row(
        "the outputs cannot be collected",
        fix="check whether the job, or a cleanup of temporary files, removed it",
    )
    TOO_MANY_OUTPUTS = Row(
        "the outputs could not be sent",
        "there are too many of them",
        "name directories, not every file",
    )
    OUTPUTS_NOT_SENT = Row(
        "the outputs could not be sent", fix="find out why the other end closed the connection"
    )
    NO_RESULTS = Row(
        "no results arrived",
        fix="see the node's log; the results are still on the node, if it is up",
    )
    NO_PLACE_FOR_RESULTS = Row("no place for results", fix=_ROOM_THERE)
    RESULTS_TOO_LARGE = Row(
        "the results do not fit", fix=_ROOM_THERE, failure=FailureClass.DISK_FULL
    )
    RESULTS_UNWRITABLE = Row(
        "the results cannot be written", fix="check the permissions and the free space there"
    )
    RESULTS_INCOMPLETE = Row("the results are not complete", fix=_KEPT)
    RESULTS_CUT_BY_DISK = Row(
        "the results are not complete",
        fix=f"make room there; {_KEPT}",
        failure=FailureClass.DISK_FULL,
    )
    OUTPUT_NOT_PLACED = Row("an output could not be put in place", fix="it is in {path}")
    # A job: its end, where Slurm made it.
    JOB_TIME_LIMIT = Row(
        "the time limit was reached, and Slurm ended the job",
        "",
        "ask for more with --time (cluster.time); a script that resumes from its checkpoint can "
        "be requeued: stager script --requeue",
        failure=FailureClass.TIME_LIMIT,
    )
    JOB_CANCELLED = Row(
        "the job was cancelled from outside (scancel)",
        "",
        "`sacct --jobs={job} --format=JobID,State%30` shows which user cancelled it",
        failure=FailureClass.KILLED,
    )
    JOB_REQUEUED = replace(
        JOB_CANCELLED,
        what="Slurm put the job back into the queue (scontrol requeue, or a failed node)",
        fix="it starts again by itself; `squeue --start --jobs={job}` shows when",
    )
    JOB_NODE_FAILURE = Row(
        "a node of the job was lost",
        "",
        "leave it out with --exclude, or let the job continue without it: --nodes MIN:MAX",
        failure=FailureClass.NODE_FAILURE,
    )
    JOB_PREEMPTED = Row(
        "another job took the nodes (preemption)",
        "",
        "submit it with `stager script --requeue`, or in a partition that is not preempted",
        failure=FailureClass.PREEMPTION,
    )
    JOB_ENDED = Row(
        "Slurm ended the job: {ending}",
        "",
        "`scontrol show job {job}` may say more",
        failure=FailureClass.UNKNOWN,
    )
    # Of another version: its words are its values.
    OTHER = Row("{what}", "{why}", "{fix}", failure=FailureClass.UNKNOWN)


JOB_ENDINGS = {ending.value: ProblemCode.from_json(f"job-{ending}") for ending in Ending}
"""The problem of a job that Slurm ended, by the reason."""


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a node from running the job."""

    code: ProblemCode  # its kind
    where: str  # the directory, host, interface or module it concerns
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The findings that its words name, with numbers: ``needs 1.4 GB, 0.2 GB are free``."""

    @property
    def what(self) -> str:
        """The fault: ``the environment does not fit``."""
        return self._fill(self.code.row.what)

    @property
    def why(self) -> str:
        """The finding: ``needs 1.4 GB, 0.2 GB are free``."""
        return self._fill(self.code.row.why)

    @property
    def fix(self) -> str:
        """The remedy, a thing that the user can do."""
        return self._fill(self.code.row.fix)

    @property
    def sentence(self) -> str:
        """The problem as a sentence that does not begin with its place."""
        return "; ".join(filter(None, (self.what, self.why, self.fix)))

    @property
    def is_end_of_job(self) -> bool:
        """True for the end of a job that Slurm made."""
        return self.code is ProblemCode.JOB_ENDED or self.code in JOB_ENDINGS.values()

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}" if self.where else self.sentence

    def _fill(self, text: str) -> str:
        return text.format_map({**self.values, "where": self.where})

    def to_json(self) -> dict[str, object]:
        """Return the fields and the words as a JSON object."""
        words = {"what": self.what, "why": self.why, "fix": self.fix}
        return {"code": str(self.code), "where": self.where, "values": dict(self.values), **words}

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> Problem:
        """Read :meth:`to_json`'s output; one of another version is shown in its own words.

        KeyError if it has no words; TypeError if it is none.
        """
        if not isinstance(raw, Mapping):
            raise TypeError("it is no object")
        values = raw.get("values")
        with contextlib.suppress(KeyError):
            code = ProblemCode.from_json(raw.get("code"))
            if isinstance(values, Mapping) and values.keys() >= code.names:
                given = {key: _get_text(values, key) for key in values}
                return cls(code, _get_text(raw, "where"), given)
        words = {"what": _get_text(raw, "what"), "why": "", "fix": ""}
        words.update((key, _get_text(raw, key)) for key in ("why", "fix") if key in raw)
        return cls(ProblemCode.OTHER, _get_text(raw, "where") if "where" in raw else "", words)


def _get_text(raw: Mapping[str, object], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return value


def make_ending_problem(ending: str, job_id: str) -> Problem:
    """Return the problem of a job that Slurm ended; another version's ending is accepted."""
    where, code = f"job {job_id}", JOB_ENDINGS.get(ending)
    if code is None:
        return Problem(ProblemCode.JOB_ENDED, where, {"job": job_id, "ending": ending})
    return Problem(code, where, {"job": job_id})


class NodeError(Exception):
    """The one expected failure of the far side."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


_WIDEST = 100  # characters of a fault and its finding that are shown as one line


class ShownProblem(NamedTuple):
    """A line, those that support it, and what to do."""

    line: str  # the fault with its place, and the finding if there is room for it
    findings: tuple[str, ...]  # the findings, if there are several or they are long
    hint: str  # the remedy


def format_problem(problem: Problem, here: Collection[str]) -> ShownProblem:
    """Return a problem as it is shown where the places ``here`` need no name."""
    place = "" if problem.where in here else problem.where
    line, finding = ": ".join(filter(None, (place, problem.what))), problem.why
    whole = "; ".join(filter(None, (line, finding)))
    if len(whole) <= _WIDEST:
        return ShownProblem(whole, (), problem.fix)
    return ShownProblem(line, tuple(finding.split("; ")), problem.fix)
