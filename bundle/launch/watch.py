"""Tells the node's agent how far a rank is: begun, out of its group, at its end, still there.

Written verbatim as ``_stager_watch.py`` beside the run wrapper, which imports it, so it stands
alone: standard library only, Python 3.9 or newer. Each word is one JSON line into the named pipe
``$STAGER_JOB_DIR/output/ranks``::

    {"event": "started", "rank": 3, "local_rank": 1, "pid": 4242, "time": 1700000000.0}
    {"event": "left", ...}
    {"event": "joined", ...}
    {"event": "finished", ..., "status": 0, "joined": true}
    {"event": "lingers", ..., "threads": ["thread saver"]}

``left`` comes when the rank has destroyed PyTorch's default process group, and ``joined`` when it
is in one again. ``finished`` says with which exit status the program ended, and whether it had ever
joined a process group of PyTorch's; ``lingers`` comes if the process is still there
``STAGER_LINGER_SECONDS`` later.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import time
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Callable, Optional

LINGER_SECONDS = 30.0
NAMED, NAME_LENGTH = 8, 60
OTHERS = ("horovod", "mpi4py")
"""Packages by which ranks meet without PyTorch's process groups."""
GROUPS = "torch.distributed.distributed_c10d"
"""The module of PyTorch that makes and destroys process groups."""


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
    module = sys.modules.get(GROUPS)
    return module is not None and getattr(module, "_backend", "unknown") is not None


def begin() -> None:
    """Tell that this rank's process is there, and see to it that leaving its group is told."""
    tell("started")
    if os.environ.get("STAGER_JOB_DIR"):
        sys.meta_path.insert(0, _GroupsFinder())


class _GroupsFinder:
    """Delegates to the other finders; marks the spec of the module of process groups."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[ModuleSpec]:
        finders: list[Any] = sys.meta_path
        if fullname != GROUPS or self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: Optional[ModuleSpec] = find(fullname, path, target) if find else None
            if spec is not None:
                if type(spec) is ModuleSpec:
                    spec.__class__ = _Marked
                return spec
        return None


class _Marked(ModuleSpec):
    """A spec that detects the end of its import, which the import system notes on it."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            super().__setattr__("__class__", ModuleSpec)
            module = sys.modules.get(self.name)
            if module is not None:
                follow(module)


def follow(groups: types.ModuleType) -> None:
    """Report when a rank leaves or joins the default group; an unknown PyTorch is unchanged."""
    names = ("destroy_process_group", "init_process_group", "is_initialized")
    destroy, init, is_member = (getattr(groups, name, None) for name in names)
    if callable(destroy) and callable(init) and callable(is_member):
        groups.__dict__[names[0]] = _told_of(destroy, is_member)
        groups.__dict__[names[1]] = _told_of(init, is_member)


def _told_of(change: Callable[..., Any], is_member: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def changed(*args: object, **kwargs: object) -> object:
        before = is_member()
        try:
            return change(*args, **kwargs)
        finally:
            after = is_member()
            if after != before:
                tell("joined" if after else "left")

    return changed


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
