"""A signature of a bundle, checked by OpenSSH's ``ssh-keygen``: on the login side, and on a node.

What is signed is one line that names the bundle's id, which covers every byte of the bundle: a node
can check the signature before it has anything of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Callable

from ..channel.bootstrap import make_memory_file
from ..node.node_root import close_after
from ..protocol.job import Job, Trust
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import processes
from ..system.processes import CompletedCommand

NAMESPACE = "stager-bundle"  # the purpose of the signature: one made for another is none
KEYGEN = "ssh-keygen"
SECONDS = 60.0  # time that ``ssh-keygen`` may take; it needs milliseconds
REFUSED = 255  # the exit status for a signature that is refused; before 8.1 it is another

Run = Callable[[Sequence[str], str], CompletedCommand]  # runs a command that reads a text


def statement(bundle_id: str) -> str:
    """Return the text that is signed."""
    return f"stager bundle {bundle_id}\n"


@contextlib.contextmanager
def open_as_path(text: str) -> Iterator[str]:
    """Yield a path at which a process of this user can read a text; it is in no directory."""
    with close_after(make_memory_file(text.encode())) as handle:
        yield f"/proc/{os.getpid()}/fd/{handle}"


def verify_signature(trust: Trust, bundle_id: str, run: Run) -> CompletedCommand:
    """Let ``ssh-keygen`` say whether a signer has signed a bundle, and may."""
    with open_as_path(trust.signers) as signers, open_as_path(trust.signature) as signature:
        argv = [KEYGEN, "-Y", "verify", "-n", NAMESPACE, "-f", signers, "-I", trust.signer]
        return run([*argv, "-s", signature], statement(bundle_id))


def check_signature(job: Job) -> str:
    """Check the signature of a job's bundle, if required; return why it cannot be checked here."""
    return "" if job.trust is None else _check_cached(job.trust, job.bundle_id)


@functools.lru_cache(maxsize=1)
def _check_cached(trust: Trust, bundle_id: str) -> str:
    try:
        done = verify_signature(trust, bundle_id, _run)
    except processes.ProcessError as exc:
        if exc.code is None:
            return f"{KEYGEN} {exc.reason}"
        raise _make_refusal(bundle_id, exc.reason) from exc
    if done.returncode == 0:
        return ""
    if done.returncode > 0 and done.returncode != REFUSED:
        return f"{KEYGEN} there is older than OpenSSH 8.1"
    words = "; ".join(parse_keygen_lines(done))
    raise _make_refusal(bundle_id, words or processes.describe_exit(done.returncode))


def parse_keygen_lines(done: CompletedCommand) -> tuple[str, ...]:
    """Return what ``ssh-keygen`` said, without the names of files that are in memory."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    file = rf"^/proc/{os.getpid()}/fd/\d+"
    numbered = (re.sub(rf"{file}:(\d+)", r"line \1", line) for line in lines)
    return tuple(re.sub(file, "a file in memory", line) for line in numbered)


def _run(argv: Sequence[str], text: str) -> CompletedCommand:
    return processes.run(argv, timeout=SECONDS, input=text, check=False)


def _make_refusal(bundle_id: str, why: str) -> NodeError:
    return NodeError(Problem(ProblemCode.SIGNATURE_REFUSED, bundle_id[:12], {"why": why}))
