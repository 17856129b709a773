"""Runs one rank of a job again, without the others.

``stager replay`` starts it in a directory with the run wrapper and ``replay.json``, with the
interpreter of the job's environment: standard library only, Python 3.9 or newer. ``replay.json``
lists the variables of the rank, the directory that is to get the project's files (empty for none),
the working directory, and true for the debugger. The file ``begun`` says that the program has been
started. Everything else is the wrapper's: the exit status, and ``failures/<RANK>.json``.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pdb
import shutil
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

REQUEST, BEGUN = "replay.json", "begun"
FAKE = "fake"  # PyTorch's backend of a group that has no other member
_STORE_SECONDS = 10.0  # a wait for a key that another rank would have set
_INIT = ("backend", "init_method", "timeout", "world_size", "rank", "store", "group_name")


def main(argv: list[str]) -> int:
    """Run the program that ``argv`` asks for as the rank of the request; return its status."""
    folder = Path(__file__).parent
    variables, tree, work_dir, is_debugged = json.loads((folder / REQUEST).read_bytes())
    wrapper: Any = importlib.import_module("run_wrapper")
    os.environ.pop("PYTHONPATH", None)  # that of `exec`; ranks have none
    os.environ.update(variables)
    if tree:
        place_project(os.environ.get("STAGER_PROJECT", ""), tree, is_linked=False)
        place_project(os.environ.get("STAGER_ASSETS", ""), tree, is_linked=True)
    os.chdir(work_dir)
    errors: list[BaseException] = []
    write_record = wrapper.write_record

    def keep_error(error: BaseException, status: int) -> None:
        errors.append(error)
        write_record(error, status)

    wrapper.follow_groups = fake_process_groups
    wrapper.write_record = keep_error
    (folder / BEGUN).touch()
    status: int = wrapper.main(argv)
    if is_debugged and errors and errors[-1].__traceback__:
        debug(errors[-1], wrapper.is_own_file)
    return status


def place_project(source: str, tree: str, *, is_linked: bool) -> None:
    """Put the files of a directory into another one that may have some of them.

    Without links the program may change them: an environment is never written to.
    """
    for name, folders, files in os.walk(source):
        folder = Path(name)
        inner = Path(tree) / folder.relative_to(source)
        if inner.is_symlink():  # one of the run directory's, which may lead to files of the user's
            inner.unlink()
        inner.mkdir(parents=True, exist_ok=True)
        for entry in (*files, *(each for each in folders if (folder / each).is_symlink())):
            target = inner / entry
            if not os.path.lexists(target):
                if is_linked:
                    target.symlink_to(folder / entry)
                else:
                    shutil.copy2(folder / entry, target, follow_symlinks=False)


def fake_process_groups(groups: ModuleType) -> None:
    """Give every process group PyTorch's fake backend, whose operations return at once."""
    functions = vars(groups)
    begin, make_group = functions["init_process_group"], functions["new_group"]

    @functools.wraps(begin)
    def begin_alone(*args: object, **asked: Any) -> None:  # noqa: ANN401 - PyTorch's own
        asked = {**dict(zip(_INIT, args)), **asked}  # noqa: B905 - Python 3.9
        _load_fake_backend()
        store = sys.modules["torch.distributed"].HashStore()
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        begin(
            backend=FAKE,
            store=store,
            rank=_choose(asked.get("rank"), "RANK"),
            world_size=_choose(asked.get("world_size"), "WORLD_SIZE"),
            group_name=asked.get("group_name", ""),
        )
        _keep_local_gradients()

    @functools.wraps(make_group)
    def make_fake_group(ranks: object = None, *_args: object, **asked: object) -> object:
        kept = {name: asked[name] for name in ("group_desc", "sort_ranks") if name in asked}
        return make_group(ranks, **kept)

    def split_group(*args: Any, **asked: Any) -> object:  # noqa: ANN401 - PyTorch's own
        ranks = asked.get("split_ranks", args[1] if len(args) > 1 else None) or []
        made = [(each, make_fake_group(each)) for each in ranks]
        own = int(os.environ["RANK"])
        return next((group for each, group in made if own in each), None)

    replaced: dict[str, Callable[..., object]] = {
        "init_process_group": begin_alone,
        "new_group": make_fake_group,
        "split_group": split_group,
        "monitored_barrier": _do_nothing,  # which only Gloo has
        # The fake backend does not transfer the size of an object, so none could be read.
        "broadcast_object_list": _do_nothing,
        "recv_object_list": _receive_objects,
        "scatter_object_list": _scatter_objects,
    }
    functions.update({name: new for name, new in replaced.items() if name in functions})


def _choose(asked: object, variable: str) -> int:
    is_given = isinstance(asked, int) and asked >= 0
    return int(str(asked) if is_given else os.environ[variable])


def _load_fake_backend() -> None:
    try:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    except ImportError as exc:
        why = f"stager replay: this torch has no backend for one rank alone ({exc})"
        raise RuntimeError(why) from exc


def _keep_local_gradients() -> None:
    """Let DistributedDataParallel keep the rank's own gradients.

    It reads the result of an all-reduce, and that of the fake backend has none (torch 2.13).
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    model: Any = getattr(parallel, "DistributedDataParallel", None)
    if model is None or hasattr(model, "_stager_init"):
        return
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks")
    register, model._stager_init = model.register_comm_hook, model.__init__

    @functools.wraps(model._stager_init)
    def begin(self: Any, *args: object, **kwargs: object) -> None:  # noqa: ANN401
        self._stager_init(*args, **kwargs)
        register(self, None, hooks.noop_hook)

    model.__init__ = begin
    model.register_comm_hook = _do_nothing


def _do_nothing(*_args: object, **_kwargs: object) -> None:
    pass


def _receive_objects(objects: list[Any], src: int = 0, *_args: object, **_more: object) -> int:
    return src


def _scatter_objects(
    received: list[Any], sent: list[Any] | None = None, *_args: object, **_more: object
) -> None:
    if sent:
        received[0] = sent[min(int(os.environ["RANK"]), len(sent) - 1)]


# --- The debugger at the exception ---------------------------------------------------------------


def debug(error: BaseException, is_own_file: Callable[[str], bool]) -> None:
    """Start the debugger in the last frame of the user's own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [is_own_file(frame.f_code.co_filename) for frame in reversed(frames)]
    debugger = pdb.Pdb()
    debugger.reset()
    if any(own[1:]) and not own[0]:
        debugger.cmdqueue.append(f"up {own.index(True)}")
    debugger.interaction(None, error.__traceback__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
