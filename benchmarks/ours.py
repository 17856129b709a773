"""The commands of ``stager`` and its far side: argv as pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .peers import Argv


def lock(stager: str) -> Argv:
    """Pin the requirements; before anything is measured."""
    return (stager, "lock", "-q")


def build(stager: str, *, offline: bool = True, prove: bool = False) -> Argv:
    """Make the bundle from wheels that are there, with a lock that is there."""
    kept = ("--locked", "--offline") if offline else ("--locked",)
    return (stager, "build", "--json", *kept, *(() if prove else ("--no-prove",)))


def program_of(bundle: Path, folder: Path) -> Argv:
    """Take the far side's program out of a bundle."""
    return ("tar", "-xf", str(bundle), "-C", str(folder), "node.pyz")


def unpack(python: str, program: Path, bundle: Path, base: Path) -> Argv:
    """The far side's own unpacking, digests and all, as it is started on a node."""
    return (
        python,
        "-I",
        "-S",
        str(program),
        "unpack",
        "--trusted",
        "--python",
        python,
        str(bundle),
        str(base),
    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of ``verify`` and ``run``."""

    allocation: str
    """``local`` or ``slurm``."""
    nodes: int
    """How many."""
    ranks: int
    """On each of them."""
    bundle: Path
    """What is staged."""
    logs: Path
    """Where logs go."""
    transfer: str = ""
    """How the nodes get it; empty for what the program chooses."""

    @property
    def options(self) -> Argv:
        """As the command line has them; on Slurm everything is sent, nothing read from afar."""
        stage = ("--stage", "always") if self.allocation == "slurm" else ()
        way = ("--transfer", self.transfer) if self.transfer else ()
        return (
            *("--allocation", self.allocation, "--nodes", str(self.nodes), *stage, *way),
            *("--bundle", str(self.bundle), "--log-dir", str(self.logs)),
        )


def verify(stager: str, job: Job) -> Argv:
    """Stage and check, without a launch."""
    return (stager, "verify", "--json", *job.options)


def run(stager: str, job: Job, script: str) -> Argv:
    """Stage, check and launch."""
    return (stager, "run", *job.options, "--nproc-per-node", str(job.ranks), "--", script)
