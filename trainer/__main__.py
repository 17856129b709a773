"""The command line: ``python -m trainer NAME``, in one process or as each rank of a job.

Exit codes: 0 trained; 1 an expected failure, with a message and a hint; 2 a usage error.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from . import config, dist

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

NEEDED = ("torch", "transformers", "accelerate", "numpy")


def main(argv: Sequence[str] | None = None) -> int:
    """Train what the command line asks for and return the exit code."""
    options = config.parse(sys.argv[1:] if argv is None else argv)
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    world = dist.World()
    try:
        world = dist.world_of(os.environ)
        _require(NEEDED)
        world = dist.start(world)
        dist.together(world, lambda: config.check(options))
        workload = importlib.import_module(
            f".{config.WORKLOADS[options.workload].module}", "trainer"
        )
        workload.run(options, world)
    except config.TrainerError as error:
        if world.is_first or not error.everywhere:
            where = "" if error.everywhere or world.size == 1 else f"[RANK {world.rank}] "
            sys.stderr.write(f"{where}error: {error}\n")
            sys.stderr.flush()
        return 1
    dist.stop(world)
    return 0


def _require(modules: Sequence[str]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise config.TrainerError(
            f"{sys.executable} has no {', '.join(missing)}",
            hint="run it in a staged environment (stager run, stager exec), or install "
            "torch, transformers, datasets, accelerate and numpy",
        )


if __name__ == "__main__":
    sys.exit(main())
