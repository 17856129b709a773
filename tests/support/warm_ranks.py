"""Ranks of the trainer that begin at once: forks of one process that has imported PyTorch.

Importing PyTorch takes a rank seconds of processor time, and a test of the trainer trains for less.
Torchrun's own way is tested where it matters: with signals, with hand-made launches, in jobs.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bundle.system.parent_death import signal_at_parent_death

_PAUSE_SECONDS = 0.02
_MOST_SECONDS = 500.0
_GRACE_SECONDS = 30.0
"""Time that other ranks get to notice that one has failed."""


@dataclass(frozen=True)
class Launch:
    """A launch of the trainer."""

    ranks: int
    """The number of ranks; 0 for a process without a launcher."""
    arguments: list[str]
    """The command line of the trainer."""
    folder: str
    """The working directory."""
    env: dict[str, str]
    """All variables, but for those of a rank."""
    output: str
    """The file that gets standard output."""
    errors: str
    """The file that gets standard error."""


class WarmRanks:
    """The process that ranks are forked from; it ends with its standard input."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start it with the variables that PyTorch reads while it is imported."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_ranks"],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def train(
        self, ranks: int, folder: Path, arguments: Sequence[str], env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Train to the end in ``folder``; the exit status is 1 if any of several ranks failed."""
        output, errors = folder / ".warm.out", folder / ".warm.err"
        launch = Launch(ranks, [*arguments], str(folder), dict(env), str(output), str(errors))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(launch)) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        code = int(any(codes)) if len(codes) > 1 else codes[0]
        texts = [path.read_text(encoding="utf-8") for path in (output, errors)]
        output.unlink()
        errors.unlink()
        return subprocess.CompletedProcess(list(arguments), code, *texts)


def _serve() -> None:
    """Serve launches, one a line, with their ranks' exit statuses; a rank leaves by SystemExit."""
    for line in sys.stdin:
        launch = Launch(**json.loads(line))
        ranks = [_forked(launch, variables) for variables in _rank_variables(launch)]
        print(json.dumps(_exit_codes(ranks)), flush=True)


def _rank_variables(launch: Launch) -> list[dict[str, str]]:
    """Return the variables of each rank, as torchrun sets them."""
    if not launch.ranks:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    count = str(launch.ranks)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": "0",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(launch.ranks)]


def _forked(launch: Launch, variables: Mapping[str, str]) -> int:
    """Fork a rank and return its process id; the rank itself runs the trainer and exits."""
    process = os.fork()
    if process:
        return process
    signal_at_parent_death(signal.SIGKILL)
    os.environ.clear()
    os.environ.update(launch.env | dict(variables))
    os.chdir(launch.folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for path, standard in ((launch.output, 1), (launch.errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), standard)
    sys.argv[1:] = launch.arguments
    sys.path.insert(0, launch.folder)
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
    sys.exit()


def _exit_codes(ranks: Sequence[int]) -> list[int]:
    """Wait for ranks; once one has failed, or the time is over, end those that are left."""
    codes: dict[int, int] = {}
    until = time.monotonic() + _MOST_SECONDS
    while len(codes) < len(ranks):
        for rank in set(ranks) - codes.keys():
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            until = min(until, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > until:
            for rank in set(ranks) - codes.keys():
                os.kill(rank, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)
    return [codes[rank] for rank in ranks]


if __name__ == "__main__":
    signal_at_parent_death(signal.SIGKILL)
    import torch._dynamo  # which any optimizer imports
    import torch.distributed
    import torch.nn.parallel  # noqa: F401

    _serve()
