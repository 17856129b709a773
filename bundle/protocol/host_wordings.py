"""The words of problems with hosts that are reached over ``ssh``."""

from __future__ import annotations

from collections.abc import Mapping

from .enumerations import FailureClass
from .problem import ProblemCode
from .wording import Wording

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
