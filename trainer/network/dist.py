"""The place of this process among the ranks of a job, and exchanges between the ranks.

A launcher (torchrun, or srun through the wrapper) sets it in the environment: RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without them the process is alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from ..config import TrainerError
from ..counts import counted

T = TypeVar("T")

_MEET_SECONDS = 60.0
"""Seconds that ranks may take to come together."""
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = {"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Variables that hold numbers, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process in the job."""

    rank: int = 0
    """This process among all, from 0."""
    size: int = 1
    """Processes in the job."""
    local_rank: int = 0
    """This process among those of its node, from 0."""
    local_size: int = 1
    """Processes on this node."""
    launched: bool = False
    """True if a launcher started it; only then is there a process group."""
    backend: str = "gloo"
    """``nccl`` on GPUs, ``gloo`` on CPUs; known once it has started."""

    @property
    def is_first(self) -> bool:
        """True for the process that writes and reports for all."""
        return self.rank == 0

    @property
    def device(self) -> str:
        """The device of this process, as PyTorch names it."""
        return "cuda" if self.backend == "nccl" else "cpu"


def world_of(environ: Mapping[str, str]) -> World:
    """Return the world that a launcher describes in ``environ``.

    Raises:
        TrainerError: the description is incomplete or contradicts itself.
    """
    if not any(environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        return World()
    numbers = _numbers_of(environ)
    return World(
        rank=numbers["RANK"],
        size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_size=numbers["LOCAL_WORLD_SIZE"],
        launched=True,
    )


def _numbers_of(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers in a launcher's variables; TrainerError names all that are wrong."""
    problems = [f"{name} is not set" for name in _REQUIRED if not environ.get(name)]
    numbers = {}
    for name, default in _NUMBERS.items():
        value = environ.get(name) or default
        if value.isdecimal():
            numbers[name] = int(value)
        else:
            problems.append(f"{name}={value} is not a number")
    if not problems and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        problems.append(f"RANK={environ['RANK']} is not below WORLD_SIZE={environ['WORLD_SIZE']}")
    if problems:
        raise TrainerError(
            "the environment does not describe a distributed job: " + ", ".join(problems),
            hint="start it with torchrun, or unset RANK and WORLD_SIZE to train in one process",
        )
    return numbers


def start(
    world: World, environ: MutableMapping[str, str] = os.environ, *, all_gpus: bool = False
) -> World:
    """Join the process group, report it in one line, and return the world with its device.

    A single process is kept to one GPU: Hugging Face's Trainer would otherwise split each batch
    over all of them in threads, and would not use the requested batch size.

    Raises:
        TrainerError: on every rank, if NCCL is requested and some nodes have no GPU for each
            process; they are named.
    """
    if not world.launched and not all_gpus:
        environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    import torch

    gpus = torch.cuda.device_count()
    backend = backend_of(world, environ, gpus)
    if backend == "nccl":
        _require_gpus(world, environ, gpus)
        torch.cuda.set_device(world.local_rank)
    if world.launched:
        _join(world, environ, backend)
    say(f"[RANK {world.rank}] WORLD_SIZE={world.size}")
    return replace(world, backend=backend)


def _require_gpus(world: World, environ: Mapping[str, str], gpus: int) -> None:
    """Refuse NCCL without GPUs, on all ranks if the job requests it."""
    if world.launched and environ.get("PYTORCH_DIST_BACKEND") == "nccl":
        _agree_on_gpus(world, environ, gpus)
    if not gpus:
        raise TrainerError(
            "PYTORCH_DIST_BACKEND is nccl, and there is no GPU here", hint="use gloo, or a GPU"
        )


def _join(world: World, environ: Mapping[str, str], backend: str) -> None:
    import torch

    try:
        torch.distributed.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        head = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        why = str(error).strip().partition("\n")[0]
        raise TrainerError(
            f"rank {world.rank} of {world.size} did not join the others at {head}: {why}",
            hint="check that MASTER_ADDR and MASTER_PORT are the head node's and free, and that "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface of this node",
        ) from error


def stop(world: World) -> None:
    """Leave the process group, if it was joined."""
    if world.launched:
        import torch.distributed as group

        if group.is_initialized():
            group.destroy_process_group()


def say(line: str) -> None:
    """Write one whole line in one call, so that the lines of different ranks do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def together(world: World, work: Callable[[], T]) -> T:
    """Do ``work`` on every rank, and continue only if it succeeded on all of them.

    A rank that gave up alone would leave the others waiting for it in the next collective.

    Raises:
        TrainerError: on every rank, with the ranks on which ``work`` raised one.
    """
    problem = None
    result = None
    try:
        result = work()
    except TrainerError as error:
        problem = error
    _raise_anywhere(world, problem)
    return cast("T", result)


def by_first(world: World, work: Callable[[], T]) -> T:
    """Do ``work`` on rank 0 alone, and hand its result to every rank.

    Raises:
        TrainerError: on every rank, if ``work`` raised one.
    """
    result = together(world, lambda: work() if world.is_first else None)
    if world.size > 1:
        import torch.distributed as group

        box = [result]
        group.broadcast_object_list(box, src=0)
        result = box[0]
    return cast("T", result)


def on_all(world: World, here: bool) -> bool:
    """Return True if something holds on every rank."""
    return sums(world, [float(here)])[0] == world.size


def sums(world: World, values: Sequence[float]) -> list[float]:
    """Return the sum of each value over all ranks."""
    if world.size == 1:
        return list(values)
    import torch
    import torch.distributed as group

    total = torch.tensor(values, dtype=torch.float64, device=world.device)
    group.all_reduce(total)
    return [float(value) for value in total.tolist()]


def _raise_anywhere(world: World, problem: TrainerError | None) -> None:
    """Raise the first rank's problem on all ranks; do nothing if there is none."""
    texts = _gathered(world, None if problem is None else (problem.message, problem.hint))
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if not failed:
        return
    message, hint = texts[failed[0]] or ("", "")
    if len(failed) < world.size:
        message = f"on rank {', '.join(map(str, failed))} of {world.size}: {message}"
    raise TrainerError(message, hint=hint, everywhere=True)


def _gathered(world: World, text: tuple[str, str] | None) -> list[tuple[str, str] | None]:
    if world.size == 1:
        return [text]
    import torch.distributed as group

    texts: list[tuple[str, str] | None] = [None] * world.size
    group.all_gather_object(texts, text)
    return texts


def backend_of(world: World, environ: Mapping[str, str], gpus: int) -> str:
    """Return ``nccl`` if each process of this node has a GPU of its own, else ``gloo``.

    ``PYTORCH_DIST_BACKEND`` decides for nodes that differ, as all ranks must choose the same.
    """
    requested = environ.get("PYTORCH_DIST_BACKEND", "")
    if requested in ("gloo", "nccl"):
        return requested
    return "nccl" if gpus >= world.local_size else "gloo"


def _agree_on_gpus(world: World, environ: Mapping[str, str], gpus: int) -> None:
    """Compare the GPUs of all nodes, before any rank waits for the others in NCCL."""
    from .rendezvous_store import agree, meet

    store = meet(world, _MEET_SECONDS, environ)
    fault = ""
    if gpus < world.local_size:
        fault = f"{store.nodes[world.rank]} has {counted(gpus, 'GPU')} for {world.local_size} "
        fault += "processes, and PYTORCH_DIST_BACKEND is nccl"
    hint = "start as many processes on a node as it has GPUs, leave these nodes out, or use gloo"
    agree(store, "gpus", fault, range(world.size), hint=hint)
