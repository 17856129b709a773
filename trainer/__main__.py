"""The command line: ``python -m trainer NAME``, in one process or as each rank of a job.

Exit codes: 0 done; 1 an expected failure, with a message and a hint; 2 a usage error; 143 stopped
by a signal, with a checkpoint to resume from; 130 interrupted without one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from . import config
from .network import all_reduce, dist

# Compute nodes have no network, and a library that tries one waits for its timeouts first.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    work, needed = _choose_work(arguments)
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    world = dist.World()
    try:
        world = dist.read_world(os.environ)
        _require(needed)
        work(world)
    except config.TrainingStopped as stop:
        if world.is_first:
            dist.write_line(f"{stop}: to continue, add --resume to the same command")
        dist.stop(world)
        return config.STOPPED
    except KeyboardInterrupt:
        said = "interrupted; nothing was saved since the last checkpoint"
        dist.write_line(f"[RANK {world.rank}] {said}")
        return 130
    except config.TrainerError as error:
        _report(error, world)
        if error.everywhere:
            dist.stop(world)  # else the first rank to end may break the others' connections
        return 1
    dist.stop(world)
    return 0


def _report(error: config.TrainerError, world: dist.World) -> None:
    if world.is_first or not error.everywhere:
        rank = "" if error.everywhere or world.size == 1 else f"[RANK {world.rank}] "
        sys.stderr.write(f"{rank}error: {error}\n")


def _choose_work(arguments: Sequence[str]) -> tuple[Callable[[dist.World], None], Sequence[str]]:
    """Return what to do, and the modules that it needs."""
    if arguments[:1] != [all_reduce.NAME]:
        options = config.parse(arguments)
        return partial(_train, options), config.WORKLOADS[options.workload].needed
    # Otherwise PyTorch prints a stack for each lost connection, above our message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return partial(all_reduce.run, all_reduce.parse(arguments[1:])), ["torch"]


def _train(options: config.Options, world: dist.World) -> None:
    world = dist.start(world, all_gpus=options.sync == "dp")
    dist.run_on_all_ranks(world, lambda: config.check_paths(options))
    page = options.workload.replace("-", "_")
    importlib.import_module(f".workloads.{page}", "trainer").run(options, world)


def _require(modules: Sequence[str]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise config.TrainerError(
            f"{sys.executable} has no {', '.join(missing)}",
            hint="run it in a staged environment (stager run, stager exec), or install "
            "torch, transformers, datasets, accelerate and numpy",
        )


def _exit_without_finalizing(status: int) -> NoReturn:
    """End a rank before a thread of Gloo could abort the finalizing (pytorch/pytorch#179291)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE"):
        _exit_without_finalizing(code)
    sys.exit(code)
