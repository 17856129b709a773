"""The commands that start ranks on a node, the choices in them, and an early launcher."""

from __future__ import annotations

import contextlib
import json
import os
import os.path
from collections.abc import Mapping, Sequence

from ..environment.listing import STATE
from ..node.node_root import choose_base, env_path, make_secure_root
from ..protocol.enumerations import Backend
from ..protocol.job import ONE_A_CPU, Job
from ..protocol.messages import LaunchRequest
from ..protocol.problem import NodeError
from ..system import processes
from .program_variables import JobDirectories, is_moving, make_environment_variables

# --- The choices of the driver for all nodes of a launch: backend, ranks a node, threads ---------


def choose_backend(setting: str, gpus: Mapping[str, int]) -> str:
    """Return the backend as set; ``auto`` is ``nccl`` if every node has a GPU, else ``gloo``."""
    missing = ", ".join(sorted(node for node, count in gpus.items() if count == 0))
    if setting == Backend.AUTO:
        return Backend.GLOO if missing else Backend.NCCL
    if setting == Backend.NCCL and missing:
        raise ValueError(f"the nccl backend needs a GPU on every node; none on {missing}")
    return setting


def must_use_cpus(backend: str, gpus: Mapping[str, int]) -> bool:
    """Tell whether ranks train on CPUs: the backend is gloo, and not every node has a GPU."""
    return backend == Backend.GLOO and 0 in gpus.values()


def choose_nproc(setting: int | None, gpus: Mapping[str, int], cpus: int) -> int:
    """Return the ranks on each node: as set, else the fewest GPUs of any node, at least 1."""
    if setting is None:
        return max(1, min(gpus.values()))
    return max(1, cpus) if setting == ONE_A_CPU else setting


def choose_threads(setting: int | None, cpus: int, nproc: int) -> int:
    """Return the CPU threads of one rank: as set, else its share of the CPUs, at least 1."""
    return max(1, cpus // nproc) if setting is None else setting


# --- The commands that start ranks on a node: pure functions, no effects -------------------------

# Launching is composition: ``torchrun(wrapper(command))``, from argument list to argument list.

WRAPPER = "run_wrapper.py"
_MODULE = ["-m", "torch.distributed.run"]
PROCESSES = "run_processes.py"  # the launcher of ranks that are plain processes, beside the wrapper


def locate_python(directories: JobDirectories) -> str:
    """Return the interpreter of an environment."""
    return os.path.join(directories.environment, "bin", "python")


def make_torchrun_argv(
    directories: JobDirectories, request: LaunchRequest, own_address: str, program: Sequence[str]
) -> list[str]:
    """Return the command that starts all ranks of one node, which has ``own_address``."""
    job = request.job  # whose id keeps two jobs apart that use one port
    return [
        locate_python(directories),
        *_MODULE,
        f"--nproc-per-node={request.group.nproc}",
        *_list_rendezvous_options(request, own_address),
        f"--rdzv-id={job.id}.{job.attempt}" + (f".{request.attempt}" if request.attempt else ""),
        f"--max-restarts={job.launch.max_restarts}",
        f"--log-dir={os.path.join(directories.job_dir, 'torchrun')}",
        *program,
    ]


def _list_rendezvous_options(request: LaunchRequest, own_address: str) -> list[str]:
    """Use c10d where ranks may meet again, which static ones never do (torch 2.13)."""
    most, group, elastic = len(request.job.nodes), request.group, request.job.launch.elastic
    if not is_moving(request.job.launch):
        return [
            f"--nnodes={most}",
            f"--node-rank={request.node_rank}",
            f"--master-addr={group.address}",
            f"--master-port={group.port}",
            "--rdzv-backend=static",
        ]
    # No node joins an allocation later; and for one that may come torchrun waits half a minute.
    least = min(elastic[0], most) if elastic else most
    host = f"[{group.address}]" if ":" in group.address else group.address
    return [
        f"--nnodes={least}:{most}" if least < most else f"--nnodes={most}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{group.port}",
        f"--rdzv-conf=is_host={int(request.node_rank == 0)}",  # else it is guessed by name
        f"--local-addr={own_address}",
    ]


def list_possible_ranks(request: LaunchRequest) -> list[range]:
    """Return for each local rank of a node the ranks that torchrun may assign to it."""
    nproc = request.group.nproc
    if is_moving(request.job.launch):
        world = len(request.job.nodes) * nproc
        return [range(local, world, nproc) for local in range(nproc)]
    first = request.node_rank * nproc
    return [range(rank, rank + 1) for rank in range(first, first + nproc)]


def make_processes_argv(
    directories: JobDirectories, request: LaunchRequest, program: Sequence[str]
) -> list[str]:
    """Return the command that starts all ranks of one node as plain processes."""
    nproc, grace = request.group.nproc, request.job.launch.grace_seconds
    return [
        locate_python(directories),
        os.path.join(directories.job_dir, PROCESSES),
        *(str(nproc), str(request.node_rank * nproc), str(grace)),
        *program,
    ]


# --- A launcher that is started before it is needed: its imports take longer than all checks -----

# It is started as soon as a node is known to have the environment, imports PyTorch, and waits for
# one JSON object ``{"argv", "variables", "cwd"}`` on standard input; at its end, ends.
# Then it runs as ``python -m torch.distributed.run`` would. It must not find modules in a working
# directory, and must not pass its standard input on.

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


class EarlyLauncher:
    """A launcher that waits; its environment cannot be removed meanwhile."""

    def __init__(self, directories: JobDirectories) -> None:
        self._python = locate_python(directories)
        self._real = os.path.realpath(self._python)
        variables = make_environment_variables(directories, os.environ)
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

            bundle_id = os.path.basename(directories.environment)
            self._lock = unpack.hold_environment(directories.root, bundle_id)
        except BaseException:
            processes.stop(self._running, 0)
            raise

    def launch(
        self, argv: Sequence[str], variables: Mapping[str, str], cwd: str
    ) -> processes.Process | None:
        """Let it launch; None if it has failed, or would not run the command."""
        running = self._running
        can_run = [*argv[:3]] == [self._python, *_MODULE]
        can_run = can_run and os.path.realpath(self._python) == self._real
        if running.stdin is None or running.poll() is not None or not can_run:
            return None
        marks = filter(None, (os.environ.get(processes.MARK), running.mark))
        variables = {**variables, processes.MARK: "/".join(marks)}
        launch = {"argv": [*argv[3:]], "variables": variables, "cwd": cwd}
        with contextlib.suppress(OSError):
            running.stdin.write(json.dumps(launch).encode() + b"\n")
            running.stdin.close()
            return running
        return None

    def close(self) -> None:
        """End it if it still waits, and release the environment."""
        if self._running.poll() is None:
            processes.stop(self._running, 0)
        for stream in filter(None, (self._running.stdin, self._running.stdout)):
            with contextlib.suppress(OSError):
                stream.close()
        os.close(self._lock)


def start_early_launcher(job: Job, root: str = "") -> EarlyLauncher | None:
    """Start one if the environment is there; any obstacle is reported by the launch itself."""
    if job.action != "run" or job.dry_run or job.launch.launcher != "torchrun":
        return None
    with contextlib.suppress(NodeError, processes.ProcessError):
        root = root or make_secure_root(choose_base(job.node_root, os.environ))
        environment = env_path(root, job.bundle_id)
        needed = ("pyvenv.cfg", "bin", STATE, os.path.join("pkgs", "torch", "distributed"))
        if all(os.path.exists(os.path.join(environment, name)) for name in needed):
            return EarlyLauncher(JobDirectories(root, environment, job_dir=""))
    return None
