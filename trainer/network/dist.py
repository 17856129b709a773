"""The place of this process among the ranks of a job, and exchanges between the ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from ..config import TrainerError, explain_errors, format_count, shorten_error

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


T = TypeVar("T")

_MEET_SECONDS = 60.0  # for the ranks to come together
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = {"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process in the job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of its node
    local_size: int = 1
    launched: bool = False  # by torchrun or srun; only then is there a process group
    backend: str = "gloo"  # ``nccl`` on GPUs, ``gloo`` on CPUs; known once it has started

    @property
    def is_first(self) -> bool:
        """True for the process that writes and reports for all."""
        return self.rank == 0

    @property
    def device(self) -> str:
        """The device of this process, as PyTorch names it."""
        return "cuda" if self.backend == "nccl" else "cpu"


def read_world(environ: Mapping[str, str]) -> World:
    """Return the world in a launcher's variables; TrainerError names all that are wrong."""
    if not any(environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        return World()
    texts = {name: environ.get(name) or default for name, default in _NUMBERS.items()}
    problems = [f"{name} is not set" for name in _REQUIRED if not environ.get(name)]
    problems += _find_wrong_numbers(texts)
    if problems:
        raise TrainerError(
            "the environment does not describe a distributed job: " + ", ".join(problems),
            hint="start it with torchrun, or unset RANK and WORLD_SIZE to train in one process",
        )
    rank, size, local_rank, local_size = map(int, texts.values())
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launched=True)


def _find_wrong_numbers(texts: Mapping[str, str]) -> list[str]:
    wrong = [f"{name}={text}" for name, text in texts.items() if not text.isdecimal()]
    if wrong:
        return [f"{setting} is not a number" for setting in wrong]
    rank, size, *_ = map(int, texts.values())
    return [f"RANK={rank} is not below WORLD_SIZE={size}"] if rank >= size else []


def start(
    world: World, environ: MutableMapping[str, str] = os.environ, *, all_gpus: bool = False
) -> World:
    """Join the process group, report it in one line, and return the world with its device."""
    if not world.launched and not all_gpus:
        # Else Hugging Face's Trainer splits each batch over all GPUs, in threads.
        environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    import torch

    gpus = torch.cuda.device_count()
    backend = choose_backend(world, environ, gpus)
    if backend == "nccl":
        _require_gpus(world, environ, gpus)
        torch.cuda.set_device(world.local_rank)
    if world.launched:
        with explain_errors(
            f"rank {world.rank} of {world.size} did not join the others at {get_head(environ)}",
            "check that MASTER_ADDR and MASTER_PORT are the head node's and free, and that "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface of this node",
            (RuntimeError, ValueError),
        ):
            torch.distributed.init_process_group(backend)
    write_line(f"[RANK {world.rank}] WORLD_SIZE={world.size}")
    return replace(world, backend=backend)


def _require_gpus(world: World, environ: Mapping[str, str], gpus: int) -> None:
    """Refuse NCCL without GPUs, on all ranks if the job requests it, before any waits in NCCL."""
    if world.launched and environ.get("PYTORCH_DIST_BACKEND") == "nccl":
        store = join_rendezvous(world, _MEET_SECONDS, environ)
        fault = describe_missing_gpus(world, store.here, gpus)
        hint = "start as many ranks on a node as it has GPUs, leave these nodes out, or use gloo"
        require_no_faults(store, "gpus", fault, hint=hint)
    if not gpus:
        message = "PYTORCH_DIST_BACKEND is nccl, and there is no GPU here"
        raise TrainerError(message, hint="use gloo, or a GPU")


def describe_missing_gpus(world: World, node: str, gpus: int) -> str:
    """Return why a node cannot run its ranks with NCCL; empty if it can."""
    counts = f"{format_count(gpus, 'GPU')} for {format_count(world.local_size, 'rank')}"
    fault = f"{node} has {counts}, and PYTORCH_DIST_BACKEND is nccl"
    return fault if gpus < world.local_size else ""


def stop(world: World) -> None:
    """Leave the process group, if it was joined."""
    if world.launched:
        import torch.distributed as group

        if group.is_initialized():
            group.destroy_process_group()


def get_head(environ: Mapping[str, str]) -> str:
    """Return address and port of the rendezvous."""
    return ":".join(environ[name] for name in _REQUIRED[2:])


def write_line(line: str) -> None:
    """Write one whole line in one call, so that the lines of different ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Do ``work`` on every rank, and continue only if it succeeded on all of them."""
    mine = result = None
    try:
        result = work()
    except TrainerError as error:
        mine = error.message, error.hint
    texts = [mine] * world.size
    if world.size > 1:
        import torch.distributed as group

        group.all_gather_object(texts, mine)
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if failed:
        message, hint = next(iter(failed.values()))
        if len(failed) < world.size:
            message = f"on rank {', '.join(map(str, failed))} of {world.size}: {message}"
        raise TrainerError(message, hint=hint, everywhere=True)
    return cast("T", result)


def run_on_first_rank(world: World, work: Callable[[], T]) -> T:
    """Do ``work`` on rank 0 alone, and hand its result to every rank."""
    result = run_on_all_ranks(world, lambda: work() if world.is_first else None)
    if world.size > 1:
        import torch.distributed as group

        box = [result]
        group.broadcast_object_list(box, src=0)
        result = box[0]
    return cast("T", result)


def sum_over_ranks(world: World, values: Sequence[float]) -> list[float]:
    """Return the sum of each value over all ranks."""
    if world.size == 1:
        return list(values)
    import torch
    import torch.distributed as group

    total = torch.tensor(values, dtype=torch.float64, device=world.device)
    group.all_reduce(total)
    return [float(value) for value in total.tolist()]


def choose_backend(world: World, environ: Mapping[str, str], gpus: int) -> str:
    """Return ``nccl`` if each process here has a GPU, unless the launcher has chosen for all."""
    requested = environ.get("PYTORCH_DIST_BACKEND", "")
    if requested in ("gloo", "nccl"):
        return requested
    return "nccl" if gpus >= world.local_size else "gloo"


# --- Faults of all ranks, by the store of their rendezvous: also where a connection is stuck -----

MARGIN = 10.0  # seconds that a rank waits for the others' messages beyond the time of their work
_AT_ONCE = 1.0  # seconds in which further faults of the same step are collected before all end
_LINGER = 20.0  # seconds that ranks stay after a fault at most, so that all can read it
NETWORK_HINT = (
    "look at the network between these nodes (cable, MTU, firewall), name the interface with "
    "[launch] interface in stager.toml, or leave one of them out with --exclude"
)


@dataclass(frozen=True, kw_only=True)
class RendezvousStore:
    """The store in which the ranks leave messages for each other."""

    world: World
    store: Store
    timeout: float  # seconds of one step
    nodes: tuple[str, ...]  # of each rank, in the order of ranks

    @property
    def here(self) -> str:
        """The node of this rank."""
        return self.nodes[self.world.rank]

    @property
    def leaders(self) -> list[int]:
        """The lowest rank of each node; rank 0 first."""
        return [self.nodes.index(node) for node in dict.fromkeys(self.nodes)]


def join_rendezvous(world: World, timeout: float, environ: Mapping[str, str]) -> RendezvousStore:
    """Join the rendezvous, and learn the node of each rank."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    node = environ.get("STAGER_NODE") or environ.get("SLURMD_NODENAME") or os.uname().nodename
    limit, head = timedelta(seconds=timeout), get_head(environ)
    with explain_errors(
        f"{node} (rank {world.rank} of {world.size}) did not meet the others at {head} "
        f"within {timeout:g} s",
        "check that the head node's port can be reached, and that each rank has started",
        (RuntimeError, ValueError),
    ):
        store, _, _ = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
    store = PrefixStore("meeting", store)
    store.set(f"node/{world.rank}", node)
    nodes: list[str] = []
    for rank in range(world.size):
        try:
            nodes.append(store.get(f"node/{rank}").decode())
        except RuntimeError as error:
            raise TrainerError(
                f"rank {rank} of {world.size} did not come to {head} within {timeout:g} s; "
                f"known so far: {', '.join(dict.fromkeys(nodes)) or 'none'}",
                hint="see its log; that of the first rank that failed says why",
            ) from error
    return RendezvousStore(world=world, store=store, timeout=timeout, nodes=tuple(nodes))


def require_no_faults(
    rendezvous: RendezvousStore,
    step: str,
    fault: str,
    longest: float = 0.0,
    hint: str = NETWORK_HINT,
) -> None:
    """Exchange the faults of a step with all ranks, and continue only if there are none."""
    ranks = range(rendezvous.world.size)
    faults = exchange_faults(rendezvous, step, fault, ranks, longest)
    if faults:
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and has reported it
            _wait_for_readers(rendezvous, step)
        raise TrainerError("\n".join(faults), hint=hint, everywhere=True)


def exchange_faults(
    rendezvous: RendezvousStore, step: str, fault: str, ranks: Sequence[int], longest: float = 0.0
) -> list[str]:
    """Report the outcome of a step to the others, wait for theirs, and return all faults.

    A fault ends the step for all, also for a rank that is still stuck in it. ``longest``: seconds
    that the others may take, if more than for one step.
    """
    store = rendezvous.store
    patience = timedelta(seconds=(longest or rendezvous.timeout) + MARGIN)
    try:
        if fault:
            store.set(f"{step}/fault/{store.add(f'{step}/faults', 1)}", fault)
            time.sleep(_AT_ONCE)
        store.set(f"{step}/{rendezvous.world.rank}", "")
        if store.add(f"{step}/came", 1) == len(ranks) or fault:
            store.set(f"{step}/go", "")
        store.wait([f"{step}/go"], patience)
        count = store.add(f"{step}/faults", 0)
        faults = {store.get(f"{step}/fault/{n + 1}").decode() for n in range(count)}
    except RuntimeError as error:
        raise _make_silence_error(rendezvous, step, ranks, error) from error
    return sorted(faults)


def _wait_for_readers(rendezvous: RendezvousStore, step: str) -> None:
    """Wait until all have read the faults, and rank 0, with which all may end, reported them."""
    store = rendezvous.store
    read = store.add(f"{step}/read", 1)
    if not rendezvous.world.is_first:
        store.wait([f"{step}/leave"], timedelta(seconds=_LINGER))
        time.sleep(_AT_ONCE)
        return
    until = time.monotonic() + _LINGER
    while read < rendezvous.world.size and time.monotonic() < until:
        time.sleep(0.05)
        read = store.add(f"{step}/read", 0)
    store.set(f"{step}/leave", "")


def _make_silence_error(
    rendezvous: RendezvousStore, step: str, ranks: Sequence[int], error: Exception
) -> TrainerError:
    try:
        silent = [rank for rank in ranks if not rendezvous.store.check([f"{step}/{rank}"])]
    except RuntimeError:
        silent = [0]  # the store itself, which is rank 0's or its launcher's
    nodes = ", ".join(dict.fromkeys(rendezvous.nodes[rank] for rank in silent))
    return TrainerError(
        f"no word from {nodes} (rank {', '.join(map(str, silent))}): {shorten_error(error)}",
        hint="see the logs of these ranks: one of them has ended, or hangs",
        everywhere=0 not in silent,
    )
