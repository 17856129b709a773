"""The words of problems with nodes and with hosts that are reached over ``ssh``."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

from .enumerations import FailureClass
from .problem import ProblemCode

# --- The words of one kind of problem ------------------------------------------------------------


@dataclass(frozen=True)
class Wording:
    """The words of a kind of problem, with its values in braces; ``{where}`` is its place."""

    what: str
    """The fault."""
    why: str = "{why}"
    """The finding; empty where the fault says it all."""
    fix: str = ""
    """The remedy."""
    failure_class: FailureClass = FailureClass.ENVIRONMENT
    """The class of a job's failure that begins with it."""
    meaning: str = ""
    """A longer explanation, for ``docs/troubleshooting.md``."""
    follows: bool = False
    """True if it follows from another node's problem."""

    @property
    def names(self) -> frozenset[str]:
        """The values that the words need."""
        parts = string.Formatter().parse(self.what + self.why + self.fix)
        return frozenset(name for _, name, _, _ in parts if name) - {"where"}


# --- The words of problems with hosts that are reached over ``ssh`` ------------------------------

_LEAVE_OUT = "or leave it out with --exclude={where}"
_TRY_IT = "find out with: ssh -v {where} true"

HOST_WORDINGS: Mapping[ProblemCode, Wording] = {
    ProblemCode.SSH_UNREACHED: Wording(
        "the host cannot be reached over ssh",
        fix=f"check whether it is up and runs sshd (ssh {{where}} true), {_LEAVE_OUT}",
        failure_class=FailureClass.NODE_FAILURE,
        meaning="the host is down, its sshd does not run or listens on another port (a `Port` line "
        "for it belongs into `~/.ssh/config`), or a firewall is in between",
    ),
    ProblemCode.SSH_NAME_UNKNOWN: Wording(
        "no host has this name",
        fix="correct it in --hosts, the host file or [cluster] hosts; a name that only ssh knows "
        "belongs into ~/.ssh/config",
        failure_class=FailureClass.NAME_RESOLUTION,
    ),
    ProblemCode.SSH_NO_LOGIN: Wording(
        "the host does not let you in without a password",
        fix="put your key on it (ssh-copy-id {where}), or load it into an agent (ssh-add); "
        "write user@host where your user name there is another one",
        meaning="nobody is there to type a password when a job starts, so `ssh` must get in with a "
        "key, a ticket or host-based trust. Try it: `ssh -o BatchMode=yes HOST true`",
    ),
    ProblemCode.SSH_KEY_UNKNOWN: Wording(
        "the host's key is not known here, so ssh does not trust it",
        fix="connect to it once by hand and compare the key (ssh {where} true); or let your "
        "administrators publish the keys in /etc/ssh/ssh_known_hosts",
        meaning="with `StrictHostKeyChecking accept-new` in `~/.ssh/config`, keys of hosts that "
        "are new are accepted by themselves",
    ),
    ProblemCode.SSH_KEY_CHANGED: Wording(
        "the host has another key than it had before",
        fix="ask your administrators whether {where} was installed anew; if so, forget the old "
        "key: ssh-keygen -R {where}",
        meaning="either the host was installed anew, or another machine answers in its name",
    ),
    ProblemCode.SSH_TURNED_AWAY: Wording(
        "the connection was closed before the login",
        fix="see the log of the host's sshd, or of a jump host's in front of it: it takes too few "
        f"logins at a time (MaxStartups), or none of yours (AllowUsers, PAM); {_LEAVE_OUT}",
        failure_class=FailureClass.NODE_FAILURE,
        meaning="sshd takes ten logins at a time as a rule, and closes more and more of any "
        "further connections at once. A host that was turned away is tried again a few times, and "
        "fewer are logged in to at a time; with `ControlMaster auto` for a jump host in "
        "`~/.ssh/config` all logins through it are one",
    ),
    ProblemCode.SSH_LOGIN_FAILED: Wording(
        "the login failed",
        fix=f"{_TRY_IT}; {_LEAVE_OUT}",
        failure_class=FailureClass.NODE_FAILURE,
        meaning="`ssh` or the host's login has ended, or did nothing for too long: a home "
        "directory that is not served, a full table of processes, an account that has expired",
    ),
    ProblemCode.SSH_CONNECTION_LOST: Wording(
        "the ssh connection to the host broke",
        fix=f"check whether it is up (ssh {{where}} uptime), {_LEAVE_OUT}",
        failure_class=FailureClass.NODE_FAILURE,
        meaning="the host went down or its network did, or its sshd was killed. What runs there "
        "is told to end as soon as the host notices, too",
    ),
    ProblemCode.SSH_SAME_HOST: Wording(
        "it is the same host as {first}",
        "both have the address {address}",
        "name each host once; the number of ranks on it is --nproc-per-node",
    ),
    ProblemCode.SSH_NOT_STARTED: Wording(
        "ssh cannot be started here", fix="install OpenSSH's client, and put ssh on PATH"
    ),
}
"""By code."""


# --- The words of problems with a node: its directories, its Python, its network, its answers ----

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

NODE_WORDINGS: Mapping[ProblemCode, Wording] = {
    # Its directories.
    ProblemCode.PATH_NOT_EXAMINED: Wording("cannot be examined", fix=_MOVE_IT),
    ProblemCode.NO_PLACE: Wording(
        "no directory on this node can hold the environment",
        fix=_MEND_OR_MOVE,
        meaning="each candidate is listed with what is wrong with it: no inodes, noexec, shared, "
        "not writable",
    ),
    ProblemCode.NO_PLACE_WITH_ROOM: Wording(
        "no directory on this node can hold the environment",
        fix=_MEND_OR_MOVE,
        failure_class=FailureClass.DISK_FULL,
        meaning="each candidate is listed with what is wrong with it; at least one lacks space",
    ),
    ProblemCode.UNSET_VARIABLE: Wording(
        "no directory can be chosen for the environment",
        "the variable ${name} is not set on this node",
        _MOVE_IT,
    ),
    ProblemCode.NODE_ROOT_REFUSED: Wording(
        "cannot be used as node root",
        fix=_MOVE_IT,
        meaning="the directory existed already, and is a link or belongs to someone else. Remove "
        "it, or set `$STAGER_NODE_ROOT`",
    ),
    ProblemCode.NODE_ROOT_BASE_REFUSED: Wording("cannot hold the node root", fix=_MOVE_IT),
    ProblemCode.NOT_A_NODE_ROOT: Wording(
        "cannot be cleaned", "it is not named like a node root of stager", _MOVE_IT
    ),
    ProblemCode.NOT_REMOVED: Wording(
        "cannot be removed", fix="remove {where} by hand, then clean again"
    ),
    ProblemCode.NOT_REMOVED_MOUNT: Wording(
        "cannot be removed",
        "a file system is mounted at {mount}",
        "unmount it (umount {mount}), then clean again",
    ),
    # Its Python, processor and C library.
    ProblemCode.NO_PYTHON: Wording(
        "no Python 3.9 or newer was found",
        "tried {count} names, python3 on PATH among them",
        "install Python there, or leave the node out with --exclude={where}",
        meaning="the agent needs any Python 3.9 or newer under one of the usual names on `PATH`",
    ),
    ProblemCode.NO_CPYTHON: Wording(
        "there is no CPython {version}, which the bundle was built for",
        "found {listed}",
        "put python{version} on PATH on every node (module load, pyenv or conda), build for the "
        "nodes' version with [environment] python in stager.toml, or let the bundle bring its "
        'Python: interpreter = "bundled" there',
        meaning="the message lists every interpreter that was found",
    ),
    ProblemCode.NO_CONTAINER_PROGRAM: Wording(
        "it has neither apptainer nor singularity",
        "--container-image needs one of them",
        "put one of them on PATH there (module load before the job), or leave the node out with "
        "--exclude={where}",
        meaning="a `.sif` or a directory of `--container-image` needs one of them on each node",
    ),
    ProblemCode.IMAGE_UNREADABLE: Wording(
        "the container image cannot be read",
        "{image} does not exist, or this user cannot read it",
        "put the image where every node sees it, such as a shared file system",
    ),
    ProblemCode.OTHER_MACHINE: Wording(
        "the bundle is for another machine",
        "it is for {needed}, the node is {machine}",
        _EXCLUDE_WRONG,
    ),
    ProblemCode.OTHER_LIBC: Wording(
        "the bundle is for another C library",
        "the node's is {libc}, and the bundle's packages are for {needed}",
        _EXCLUDE_WRONG,
        meaning="a node with musl, such as Alpine Linux, cannot load what was built for glibc. "
        'Build for it with `environment.platform = "musllinux_1_2_x86_64"`, from wheels for musl',
    ),
    ProblemCode.OLD_LIBC: Wording(
        "the node's C library is too old",
        "{package} needs {needed} or newer, the node has {version}",
        _EXCLUDE_WRONG,
        meaning="a package needs a newer glibc than the node has; in brackets is the file that "
        "needs it, or the tag of its wheel. Build with a lower `environment.platform`, which "
        "takes other wheels; where the tag of a wheel promises too much, pin another version",
    ),
    ProblemCode.OLD_GPU_DRIVER: Wording(
        "has driver {driver}, the bundle's CUDA {cuda} needs {needed} or newer",
        "{package} is built for it",
        "build for the driver with [environment] torch-backend in stager.toml (cu126, cu118), or "
        "leave the node out with --exclude={where}",
        meaning="no program of the bundle could use the GPUs there: each CUDA version needs a "
        "minimal version of NVIDIA's driver. Nothing has been sent yet",
    ),
    # Its network, names and clock.
    ProblemCode.NAME_UNRESOLVED: Wording(
        "the name cannot be resolved",
        "{host} says: {why}",
        "add it to DNS or to /etc/hosts on every node",
        FailureClass.NAME_RESOLUTION,
    ),
    ProblemCode.NO_ROUTE: Wording(
        "there is no route to the address",
        "{host} says: {why}",
        f"check that the nodes share a network; {_LINK_SETTING}",
    ),
    ProblemCode.NO_INTERFACE: Wording(
        "this node has no such interface, or it has no address",
        "on {host} there are: {listed}",
        _LINK_SETTING,
        FailureClass.INTERFACE,
        meaning="`launch.interface` names an interface that only other nodes have. The line lists "
        "those of this node; with a table, each group of nodes can have another one",
    ),
    ProblemCode.INTERFACE_OF_NO_NODE: Wording(
        "no node of the job has the interface that the setting names",
        "none has {names}; on {host} there are: {listed}",
        'name one of the nodes\' own in stager.toml, or with --interface; "auto" takes the route '
        "between them",
        FailureClass.INTERFACE,
        meaning="the setting is wrong; no node failed",
    ),
    ProblemCode.NO_INTERFACE_WITH_ADDRESS: Wording(
        "no interface has this address", "on {host} there are: {listed}", _LINK_SETTING
    ),
    ProblemCode.NO_ADDRESS_FOR_OTHERS: Wording(
        "this host has no address that other nodes can be given",
        "on {host} there are: {listed}",
        _LINK_SETTING,
        meaning="on the head node its own name resolves to itself (`127.0.1.1` in `/etc/hosts`), "
        "and it has several addresses, or none",
    ),
    ProblemCode.NO_FREE_PORT: Wording(
        "none of the {span} ports from {preferred} up can be used",
        "the last error was: {why}",
        "end the processes that earlier jobs left on this node",
        FailureClass.PORT,
        meaning="the job's port and the next 63 are in use on the head node, by processes that "
        "earlier jobs left there",
    ),
    ProblemCode.NAMES_UNRESOLVED: Wording(
        "names of nodes cannot be resolved",
        "no address for {names}",
        "add them to DNS, or to /etc/hosts on every node",
        FailureClass.NAME_RESOLUTION,
    ),
    ProblemCode.NAMES_LEAD_BACK: Wording(
        "names of nodes resolve to the node itself",
        "{names}",
        "remove them from the loopback lines (127.0.1.1) of /etc/hosts there",
        FailureClass.NAME_RESOLUTION,
    ),
    ProblemCode.NAMES_DIFFER: Wording(
        "names of nodes resolve to other addresses than on the other nodes",
        "{names}",
        "correct /etc/hosts or the DNS cache there",
        FailureClass.NAME_RESOLUTION,
    ),
    ProblemCode.CLOCK_WRONG: Wording(
        "the clock is wrong",
        "it is {seconds} s {side} the others (give or take {uncertainty} s)",
        "check its time service (chronyc tracking), or exclude the node",
    ),
    ProblemCode.HEAD_PORT_TAKEN: Wording(
        "the head node cannot listen on the job's port",
        fix="end the processes that earlier jobs left on this node; `ss -tlnp` there names them",
        failure_class=FailureClass.PORT,
    ),
    ProblemCode.HEAD_IS_ANOTHER: Wording(
        "the head node cannot be reached",
        "from {host}: another program listens there; it answered {answer}",
        "end it, or start the job again",
    ),
    ProblemCode.HEAD_MUTE: Wording(
        "the head node cannot be reached",
        "from {host}: the connection was accepted, but nothing answered within {seconds} s",
        "another program may listen on that port: end it, or start the job again",
    ),
    ProblemCode.HEAD_REFUSES: Wording(
        "the head node cannot be reached",
        "from {host}: refused for {seconds} s: nothing listens there, or a firewall rejects "
        "connections",
        "check whether the head node is up, and what its firewall rejects",
    ),
    ProblemCode.HEAD_SILENT: Wording(
        "the head node cannot be reached",
        "from {host}: no answer within {seconds} s, as when a firewall drops packets",
        "let the nodes reach one another on ports 61000 to 65535, or name the interface with "
        "[launch] interface in stager.toml",
    ),
    ProblemCode.HEAD_UNREACHED: Wording(
        "the head node cannot be reached",
        "from {host}: {why}",
        "check that the nodes share a network; name the interface with [launch] interface",
    ),
    ProblemCode.HEAD_REACHED_BY_NONE: Wording(
        "no other node can reach the head node", "{why}", "{fix}"
    ),
    ProblemCode.HEAD_WITHOUT_ADDRESS: Wording(
        "the head cannot be reached",
        "none of its addresses, or none of the job's ports, can be used",
        "name the interface with --interface, or exclude the node",
    ),
    # Its answers to the driver.
    ProblemCode.NO_ANSWER: Wording(
        _NO_ANSWER,
        fix=_SEE_LOG,
        failure_class=FailureClass.NODE_FAILURE,
        meaning="the node's agent ended without an answer; the rest is what Slurm, or the exit "
        "status, says about it",
    ),
    ProblemCode.NO_ANSWER_KILLED: Wording(
        _NO_ANSWER,
        fix=_SEE_LOG,
        failure_class=FailureClass.KILLED,
        meaning="the node's agent was killed, usually because the node ran out of memory",
    ),
    ProblemCode.NO_ANSWER_EXITED: Wording(
        _NO_ANSWER,
        fix=_SEE_LOG,
        meaning="the node's agent ended by itself; its log says why",
    ),
    ProblemCode.NO_ANSWER_FOLLOWED: Wording(
        _NO_ANSWER,
        "it was ended, as {first} had failed",
        _SEE_LOG,
        FailureClass.NODE_FAILURE,
        meaning="nothing is wrong with this node; see the other one",
        follows=True,
    ),
    ProblemCode.NO_ANSWER_NO_STEP: Wording(
        _NO_ANSWER, fix=_SEE_SINFO, failure_class=FailureClass.NODE_FAILURE
    ),
    ProblemCode.NO_ANSWER_NO_START: Wording(
        _NO_ANSWER,
        "Slurm cannot start anything there ({why})",
        _SEE_SINFO,
        FailureClass.NODE_FAILURE,
        meaning="the node does not answer Slurm: it went down after the job got it, or `slurmd` "
        "died. `sinfo` takes up to a minute to notice. With `--min-nodes` the other nodes go on "
        "without it, even if this shows only when the ranks are started",
    ),
    ProblemCode.NO_ANSWER_NODE_FAILURE: Wording(
        _NO_ANSWER,
        "Slurm lost the node (node failure)",
        _SEE_SINFO,
        FailureClass.NODE_FAILURE,
        meaning="the node stopped answering Slurm while a step was running there",
    ),
    ProblemCode.NO_ANSWER_UNREACHABLE: Wording(
        _NO_ANSWER,
        "it can no longer be reached: {why}",
        "check whether it is up and its network works (sinfo -N -n {where}, ping {where}), or "
        "leave it out with --exclude={where}",
        FailureClass.NODE_FAILURE,
        meaning="the node or its network is gone, and `srun` has not noticed: the node sends no "
        "heartbeats, or the other nodes are done, and no step can be started on it",
    ),
    ProblemCode.NO_ANSWER_DESERTED: Wording(
        _NO_ANSWER,
        "nothing of the job runs there any more",
        "find out on {where} what ended slurmstepd and the job's processes: `dmesg` lists what "
        "the out-of-memory killer ended; or leave the node out with --exclude={where}",
        FailureClass.NODE_FAILURE,
    ),
    ProblemCode.NO_ANSWER_SILENT: Wording(
        _NO_ANSWER,
        "no message from it for {seconds} s",
        "look on {where} for a disk that does not answer (`dmesg`), a process of the job that is "
        "stopped (state T or D in `ps`) and a network that is down; or leave the node out with "
        "--exclude={where}",
        FailureClass.NODE_FAILURE,
        meaning="the node's agent did not take part in the transfer of the bundle, or stopped "
        "answering; the other nodes did not wait for it",
    ),
    ProblemCode.NO_ANSWER_HANGS: Wording(
        _NO_ANSWER,
        "its processes have made no progress for {seconds} s: {why}",
        "look on {where} for a disk or a file server that does not answer (`dmesg`), and leave the "
        "node out with --exclude={where}",
        FailureClass.NODE_FAILURE,
        meaning="while the node unpacked, none of its processes ran for a minute, and some were in "
        "a state in which no signal reaches them (D), or stopped (T). The line has the kernel's "
        "name of what they wait for. A slow node is given more time",
    ),
}
"""By code."""
