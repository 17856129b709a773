"""Tells the node's agent how far a rank is: begun, at the end of its program, and still there.

Written verbatim as ``_stager_watch.py`` beside the run wrapper, which imports it, so it stands
alone: standard library only, Python 3.9 or newer. Each word is one JSON line into the named pipe
``$STAGER_JOB_DIR/output/ranks``::

    {"event": "started", "rank": 3, "local_rank": 1, "pid": 4242, "time": 1700000000.0}
    {"event": "finished", ..., "status": 0, "joined": true}
    {"event": "lingers", ..., "threads": ["thread saver"]}

``finished`` says with which exit status the program ended, and whether it had ever joined a process
group of PyTorch's; ``lingers`` comes if the process is still there ``STAGER_LINGER_SECONDS`` later.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Optional

LINGER_SECONDS = 30.0
NAMED, NAME_LENGTH = 8, 60
OTHERS = ("horovod", "mpi4py")
"""Packages by which ranks meet without PyTorch's process groups."""


def tell(event: str, **more: object) -> None:
    """Tell the node's agent, if there is one that listens, how far this rank is."""
    job_dir = os.environ.get("STAGER_JOB_DIR")
    if not job_dir:
        return
    who = {"rank": _number("RANK"), "local_rank": _number("LOCAL_RANK"), "pid": os.getpid()}
    line = json.dumps({"event": event, **who, "time": time.time(), **more}) + "\n"
    with contextlib.suppress(OSError):  # nobody listens, or not now: a rank does not wait for that
        pipe = os.open(Path(job_dir, "output", "ranks"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, line.encode())  # short enough to come in one piece, see pipe(7)
        finally:
            os.close(pipe)


def joined_group() -> Optional[bool]:
    """Return whether the program has ever joined a process group; None if it meets otherwise.

    ``_backend`` is None until the first ``init_process_group``, and stays set when that group is
    destroyed (torch 2.13). Where there is no such variable, it may well have.
    """
    if "torch" not in sys.modules or any(name in sys.modules for name in OTHERS):
        return None
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and getattr(module, "_backend", "unknown") is not None


def begin() -> None:
    """Tell that this rank's process is there."""
    tell("started")


def end(status: int) -> None:
    """Say what keeps the process if it goes on for long though its program has finished.

    Python waits for threads that are not daemons, then for exit handlers. The thread that watches
    is a daemon: it ends with the process and changes nothing of how that ends.
    """
    tell("finished", status=status, joined=joined_group())
    try:
        seconds = float(os.environ.get("STAGER_LINGER_SECONDS", LINGER_SECONDS))
        threading.Thread(target=_watch, args=(seconds,), daemon=True).start()
    except (ValueError, RuntimeError):  # no such number, or no more threads: then nobody watches
        return


def _watch(seconds: float) -> None:
    time.sleep(max(0.0, seconds))
    names = lingering()
    tell("lingers", threads=names)
    why = f"waits for {', '.join(names)}" if names else "its exit handlers do not come to an end"
    node = os.environ.get("STAGER_NODE") or os.uname().nodename
    line = (
        f"stager: rank {_number('RANK')} on {node} has ended its program, but its process goes "
        f"on {seconds:g} s later: {why}\n"
    )
    # Not through sys.stderr: the interpreter may end at any moment, and must not find it locked.
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="replace"))


def lingering() -> list[str]:
    """Return the names of what keeps the process: threads that are no daemons, child processes."""
    threads = [
        f"thread {thread.name[:NAME_LENGTH]}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]
    pools = sys.modules.get("multiprocessing.process")
    children = list(getattr(pools, "_children", ())) if pools else []
    processes = [f"process {child.name[:NAME_LENGTH]}" for child in children if not child.daemon]
    return [*threads, *processes][:NAMED]


def _number(name: str) -> int:
    """Read a rank from the environment; 0 without torchrun."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0
