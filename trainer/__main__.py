"""The command line: ``python -m trainer NAME``, in one process or as each rank of a job.

NAME is a workload, or ``all-reduce``, which trains nothing and measures the network.

Exit codes: 0 done; 1 an expected failure, with a message and a hint; 2 a usage error; 143 told to
stop, with a checkpoint to go on from; 130 interrupted without one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from . import config
from .engine import stopping
from .network import all_reduce, dist

# Compute nodes have no network, and a library that tries one waits for its timeouts first. Set
# to another value beforehand, each of these is left as it is.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

Work = Callable[[dist.World], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    work = _measuring(arguments[1:]) if arguments[:1] == [all_reduce.NAME] else _training(arguments)
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    world = dist.World()
    try:
        world = dist.world_of(os.environ)
        work(world)
    except stopping.Stopped as stop:
        if world.is_first:
            dist.say(f"{stop}: the same command with --resume at its end goes on from there")
        dist.stop(world)
        return stopping.STOPPED
    except KeyboardInterrupt:
        dist.say(f"[RANK {world.rank}] interrupted; nothing was saved since the last checkpoint")
        return 130
    except config.TrainerError as error:
        if world.is_first or not error.everywhere:
            where = "" if error.everywhere or world.size == 1 else f"[RANK {world.rank}] "
            sys.stderr.write(f"{where}error: {error}\n")
            sys.stderr.flush()
        if error.everywhere:
            dist.stop(world)  # else the first to go may take the others down by a lost connection
        return 1
    dist.stop(world)
    return 0


def _training(arguments: Sequence[str]) -> Work:
    """What trains the workload that the command line names."""
    options = config.parse(arguments)

    def work(world: dist.World) -> None:
        chosen = config.WORKLOADS[options.workload]
        _require(chosen.needed)
        world = dist.start(world, all_gpus=options.sync == "dp")
        dist.together(world, lambda: config.check(options))
        workload = importlib.import_module(f".workloads.{chosen.module}", "trainer")
        workload.run(options, world)

    return work


def _measuring(arguments: Sequence[str]) -> Work:
    """What measures the network between the ranks."""
    options = all_reduce.parse(arguments)
    # Else PyTorch shows a stack of its own for each lost connection, above our message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    def work(world: dist.World) -> None:
        _require(all_reduce.NEEDED)
        all_reduce.run(options, world)

    return work


def _require(modules: Sequence[str]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise config.TrainerError(
            f"{sys.executable} has no {', '.join(missing)}",
            hint="run it in a staged environment (stager run, stager exec), or install "
            "torch, transformers, datasets, accelerate and numpy",
        )


def _leave(status: int) -> NoReturn:
    """End one rank of several, without taking the interpreter apart first.

    A thread of Gloo's may still hold tensors of an operation that is over. Were it to give them
    back while Python ends, it would abort a process whose work is done (pytorch/pytorch#179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE"):
        _leave(code)
    sys.exit(code)
