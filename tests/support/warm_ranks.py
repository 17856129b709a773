"""Programs that begin at once: forks of one process that has done their imports (seconds each)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bundle.system.processes import signal_at_parent_death
from tests.support.ports import held_port

_PAUSE_SECONDS = 0.02
_MOST_SECONDS = 1000.0
_GRACE_SECONDS = 120.0  # time that other ranks get to notice that one has failed
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)


@dataclass(frozen=True, kw_only=True)
class Rank:
    env: dict[str, str]
    program: str = ""  # the Python file or the module that it runs; the trainer where it is empty
    network: str = ""  # the file of its network namespace; this machine's where it is empty


Launch = dict[str, Any]  # the ranks, their words, and where they are


class Running:
    """A launch that goes on; one :class:`WarmRanks` has one at a time, to be waited for."""

    def __init__(self, launch: Launch, server: subprocess.Popen[str]) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        self._launch, self._answers = launch, server.stdout
        server.stdin.write(json.dumps(launch) + "\n")
        server.stdin.flush()
        self.pids: list[int] = json.loads(self._answers.readline())

    def has_ended(self) -> bool:
        return bool(select.select([self._answers], [], [], 0)[0])

    def signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and was waited for
                os.kill(pid, number)

    def wait(self) -> tuple[list[int], str, str]:
        """Wait for all; return their exit statuses, and what they wrote to output and errors."""
        codes = json.loads(self._answers.readline())
        paths = Path(self._launch["output"]), Path(self._launch["errors"])
        output, errors = (path.read_text(encoding="utf-8") for path in paths)
        for path in paths:
            path.unlink()
        return codes, output, errors


class WarmRanks:
    """The process that ranks are forked from; it ends with its standard input."""

    def __init__(self, env: Mapping[str, str], libraries: str = "torch") -> None:
        """Start it with the variables that libraries read while they are imported."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_ranks", libraries],
            cwd=Path(__file__).parents[2],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._outputs = tempfile.TemporaryDirectory(prefix="stager-test-")

    def start(self, ranks: Sequence[Rank], folder: Path, arguments: Sequence[str]) -> Running:
        files = {name: f"{self._outputs.name}/{name}" for name in ("output", "errors")}
        told = {"ranks": [*map(asdict, ranks)], "arguments": [*arguments], "folder": str(folder)}
        return Running({**told, **files}, self._process)


def as_torchrun_does(count: int, env: Mapping[str, str]) -> list[Rank]:
    """Return the ranks of one node; for 0, a process that no launcher starts."""
    if not count:
        return [Rank(env=dict(env))]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(held_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
    }
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
    return [Rank(env={**common, **one, **env}) for one in own]


def _serve() -> None:
    """Serve launches, one a line: answer with the processes, then with their exit statuses."""
    for line in sys.stdin:
        launch = json.loads(line)
        ranks = [_forked(launch, Rank(**rank)) for rank in launch["ranks"]]
        print(json.dumps(ranks), flush=True)
        print(json.dumps(_exit_codes(ranks)), flush=True)


def _forked(launch: Launch, rank: Rank) -> int:
    process = os.fork()
    if process:
        return process
    signal_at_parent_death(signal.SIGKILL)
    if rank.network:
        _enter(rank.network)
    os.environ.clear()
    os.environ.update(rank.env)
    os.chdir(launch["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for path, standard in ((launch["output"], 1), (launch["errors"], 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), standard)
    sys.argv[1:] = launch["arguments"]
    if rank.program != "stager":
        sys.path.insert(0, launch["folder"])
    if rank.program.endswith(".py"):
        runpy.run_path(rank.program, run_name="__main__")
    else:
        runpy.run_module(rank.program or "trainer", run_name="__main__", alter_sys=True)
    sys.exit()


def _enter(network: str) -> None:
    """Enter a network namespace; os.setns is new in Python 3.12."""
    place = os.open(network, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(place, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), network)
    os.close(place)


def _exit_codes(ranks: Sequence[int]) -> list[int]:
    """Wait for ranks; once one has failed, or the time is over, end those that are left."""
    codes: dict[int, int] = {}
    until = time.monotonic() + _MOST_SECONDS
    while len(codes) < len(ranks):
        failed_before = any(codes.values())
        for rank in set(ranks) - codes.keys():
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) and not failed_before:
            until = min(until, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > until:
            for rank in set(ranks) - codes.keys():
                os.kill(rank, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)
    return [codes[rank] for rank in ranks]


def _import(libraries: str) -> None:
    if libraries == "stager":
        import stager

        for module in pkgutil.walk_packages(stager.__path__, "stager."):
            if module.name != "stager.__main__":
                importlib.import_module(module.name)
        return
    import torch._dynamo  # which any optimizer imports
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

    if libraries == "transformers":
        from trainer.__main__ import OFFLINE

        os.environ.update(OFFLINE)
        import datasets  # noqa: F401
        import transformers

        # They are modules of their own, which the package imports once somebody asks for them.
        for name in ("Trainer", "BertForSequenceClassification", "BertTokenizerFast"):
            getattr(transformers, name)


if __name__ == "__main__":
    signal_at_parent_death(signal.SIGKILL)
    _import(sys.argv[1])
    _serve()
