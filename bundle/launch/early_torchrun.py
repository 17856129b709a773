"""A launcher that is started before it is needed: its imports take longer than all checks.

``torchrun`` imports all of PyTorch before it starts a rank. So it is started as soon as a node is
known to have the environment, imports, and waits for its arguments on standard input, one JSON
object ``{"argv", "variables", "cwd"}``; end of file means that nothing is launched. With its
arguments it runs as ``python -m torch.distributed.run`` would. No rank runs before that.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence

from ..environment.listing import STATE
from ..node.node_root import choose_base, env_path, secure_root
from ..protocol.job import Job
from ..protocol.problem import NodeError
from ..system import processes
from .directories import JobDirectories
from .variables import environment_variables

# Runs in the environment, under its own Python. It must not find modules in a working directory,
# and must not pass its standard input on.
_PROGRAM = r"""
import json, os, signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
sys.path[:] = [entry for entry in sys.path if entry]
from torch.distributed import run
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
line = sys.stdin.buffer.readline()
if not line:
    os._exit(0)
launch = json.loads(line)
os.environ.clear()
os.environ.update(launch["variables"])
os.chdir(launch["cwd"])
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
sys.argv[:] = [run.__file__, *launch["argv"]]
sys.exit(run.main())
"""
_MODULE = ["-m", "torch.distributed.run"]


class EarlyLauncher:
    """A launcher that waits; its environment cannot be removed meanwhile."""

    def __init__(self, directories: JobDirectories) -> None:
        """Start it.

        Raises:
            NodeError: the environment is not there.
            processes.ProcessError: it cannot be started.
        """
        self._python = os.path.join(directories.environment, "bin", "python")
        self._real = os.path.realpath(self._python)
        variables = environment_variables(directories, os.environ)
        variables.pop("STAGER_PATCHES", None)  # they are for ranks, and would print too early
        self._running = processes.start(
            [self._python, "-c", _PROGRAM],
            env={**variables, "OMP_NUM_THREADS": "1"},
            cwd=directories.environment,
            stdin=processes.PIPE,
            stdout=processes.PIPE,
            stderr=processes.STDOUT,
        )
        try:
            # Imported only now, which takes a while: the other process imports at the same time.
            from ..environment import unpack

            self._lock = unpack.hold(directories.root, os.path.basename(directories.environment))
        except BaseException:
            processes.stop(self._running, 0)
            raise

    def go(
        self, argv: Sequence[str], variables: Mapping[str, str], cwd: str
    ) -> processes.Process | None:
        """Let it launch; None if it has failed, or would not run the command."""
        running = self._running
        if running.stdin is None or running.poll() is not None or not self._would_run(argv):
            return None
        marks = filter(None, (os.environ.get(processes.MARK), running.mark))
        variables = {**variables, processes.MARK: "/".join(marks)}
        launch = {"argv": list(argv[3:]), "variables": variables, "cwd": cwd}
        try:
            running.stdin.write(json.dumps(launch).encode() + b"\n")
            running.stdin.close()
        except OSError:
            return None
        return running

    def _would_run(self, argv: Sequence[str]) -> bool:
        if list(argv[:3]) != [self._python, *_MODULE]:
            return False
        return os.path.realpath(self._python) == self._real

    def close(self) -> None:
        """End it if it still waits, and release the environment."""
        if self._running.poll() is None:
            processes.stop(self._running, 0)
        for stream in (self._running.stdin, self._running.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        os.close(self._lock)


def start(job: Job, root: str = "") -> EarlyLauncher | None:
    """Start one if the environment is there; any obstacle is reported by the launch itself."""
    if job.action != "run" or job.dry_run or job.launch.launcher != "torchrun":
        return None
    try:
        root = root or secure_root(choose_base(job.node_root, os.environ))
        environment = env_path(root, job.bundle_id)
        needed = ("pyvenv.cfg", "bin", STATE, os.path.join("pkgs", "torch", "distributed"))
        if not all(os.path.exists(os.path.join(environment, name)) for name in needed):
            return None
        return EarlyLauncher(JobDirectories(root=root, environment=environment, job_dir=""))
    except (NodeError, processes.ProcessError):
        return None
