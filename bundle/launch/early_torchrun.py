"""A launcher that is started before it is needed: its imports take longer than all checks.

``torchrun`` imports all of PyTorch before it starts a rank. So it is started as soon as a node is
known to have the environment, imports, and waits for its arguments on standard input, one JSON
object ``{"argv", "variables", "cwd"}``; its end instead means that there is nothing to launch. From
then on it is what ``python -m torch.distributed.run`` would be. No rank runs before that.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence

from ..environment.merge import STATE
from ..node.location import env_of
from ..node.root import secure_root
from ..protocol.job import Job
from ..protocol.problem import NodeError
from ..system import files, processes
from . import commands
from .commands import Place

# Runs in the environment, under its own Python. It must not find modules in a working directory,
# and hands on no standard input of its own.
_PROGRAM = r"""
import json, os, sys
sys.path[:] = [entry for entry in sys.path if entry]
from torch.distributed import run
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
line = sys.stdin.buffer.readline()
if not line:
    os._exit(0)
asked = json.loads(line)
os.environ.clear()
os.environ.update(asked["variables"])
os.chdir(asked["cwd"])
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
sys.argv[:] = [run.__file__, *asked["argv"]]
sys.exit(run.main())
"""
_MODULE = ["-m", "torch.distributed.run"]


class EarlyLauncher:
    """A launcher that waits; its environment stays in place as long."""

    def __init__(self, place: Place) -> None:
        """Start it.

        Args:
            place: where the environment lies; the job's directory does not matter yet.

        Raises:
            NodeError: the environment is not there.
            process.ProcessError: it cannot be started.
        """
        self._python = os.path.join(place.environment, "bin", "python")
        self._real = os.path.realpath(self._python)
        variables = commands.environment_variables(place, os.environ)
        variables.pop("STAGER_PATCHES", None)  # they are for ranks, and would speak too early
        self._running = processes.start(
            [self._python, "-c", _PROGRAM],
            env={**variables, "OMP_NUM_THREADS": "1"},
            cwd=place.environment,
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            stderr=processes.STDOUT,
        )
        try:
            # Only now: what this imports takes its time, and the other process does not wait.
            from ..environment import unpack

            self._lock = unpack.hold(place.root, os.path.basename(place.environment))
        except BaseException:
            processes.stop(self._running, 0)
            raise

    def go(
        self, argv: Sequence[str], variables: Mapping[str, str], cwd: str
    ) -> processes.Process | None:
        """Let it launch; None where it has failed, or would not be what ``argv`` says.

        Args:
            argv: the whole command, as it would be started otherwise.
            variables: all its variables.
            cwd: the directory it runs in.
        """
        running = self._running
        same = os.path.realpath(self._python) == self._real and list(argv[:1]) == [self._python]
        if not same or list(argv[1:3]) != _MODULE or running.poll() is not None:
            return None
        marks = filter(None, (os.environ.get(processes.MARK), running.mark))
        variables = {**variables, processes.MARK: "/".join(marks)}
        asked = {"argv": list(argv[3:]), "variables": variables, "cwd": cwd}
        if running.stdin is None:
            return None
        try:
            running.stdin.write(json.dumps(asked).encode() + b"\n")
            running.stdin.close()
        except OSError:
            return None
        return running

    def close(self) -> None:
        """End it if it still waits, and let the environment go."""
        if self._running.poll() is None:
            processes.stop(self._running, 0)
        for stream in (self._running.stdin, self._running.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        os.close(self._lock)


def start(job: Job, root: str = "") -> EarlyLauncher | None:
    """Start one if the environment is there; whatever is in the way shows at the launch itself.

    Args:
        job: the job.
        root: the node root; empty for the place where it is looked for first.
    """
    if job.action != "run" or job.dry_run or job.launch.launcher != "torchrun":
        return None
    try:
        root = root or secure_root(files.choose_base(job.node_root, 0, 0, os.environ))
        environment = env_of(job, root)
        needed = ("pyvenv.cfg", "bin", STATE, os.path.join("pkgs", "torch", "distributed"))
        if not all(os.path.exists(os.path.join(environment, name)) for name in needed):
            return None
        return EarlyLauncher(Place(root=root, environment=environment, job_dir=""))
    except (NodeError, processes.ProcessError):
        return None
