"""The way of every rank's lines into the right log: none may be missing, and the time it takes.

As root, where Slurm is installed; a cluster of its own is made and removed::

    python -m benchmarks.output --nodes 64 --rounds 3
    python -m benchmarks.output --nodes 16 --ranks 64 --lines 200 --open-files 256
    python -m benchmarks.output --nodes 4 --ranks 2 --lines 60000 --peer --rounds 3

Each rank prints numbered lines, ends at another time than the others, and its log is compared line
by line. What starts the ranks of a node with ``torchrun`` is a small program of the same name: the
way of the output is the same, and PyTorch is not what is measured.

With ``--peer`` each job is followed by ``srun`` alone with the same ranks, into one file; a job
that takes less than half of its MB/s misses the target.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cluster import Cluster, running
from .errors import BenchError
from .process import Command, run

RANK = """\
import os, sys, time
rank, lines, width = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
write = sys.stdout.write
for number in range(lines):
    write(f"rank {rank} line {number} {'x' * (number % width)}\\n")
sys.stdout.flush()
"""
LAUNCHER = """\
import os, subprocess, sys
words = iter(sys.argv[1:])
options = {}
for word in words:
    if not word.startswith("-"):
        break
    name, _, value = word.partition("=")
    options[name] = value
program = [word, *words]
each, first = int(options["--nproc-per-node"]), 0
first = int(options["--node-rank"]) * each
started = [
    subprocess.Popen(
        [sys.executable, *program],
        env={**os.environ, "RANK": str(first + local), "LOCAL_RANK": str(local)},
    )
    for local in range(each)
]
sys.exit(max(abs(one.wait()) for one in started))
"""
SETTINGS = """\
[environment]
requirements = ["./torch-1.0-py3-none-any.whl"]
torch-backend = "none"

[launch]
backend = "gloo"
"""
TARGET = 0.5
"""The least share of the MB/s of srun alone."""
_ALONE = """\
begin=$(date +%s.%N)
srun --mpi=none --overlap -c1 --ntasks-per-node="$1" sh -c \
    'RANK=$SLURM_PROCID exec "$0" "$@"' "$2" rank.py "$3" "$4" >"$5"
echo "$begin $(date +%s.%N)"
"""
_LINE = re.compile(rb"rank (\d+) line (\d+) (x*)$")


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The content of the logs of one job, counted."""

    nodes: int
    launcher: str
    expected: int
    """Lines that the ranks have printed."""
    right: int
    """Of these, in the right log, whole and in order."""
    wrong: int
    """Lines of ranks elsewhere, or not whole."""
    lost: int
    """What is neither."""
    said: bool
    """Whether the job told that something is lost."""
    code: int
    """Its exit status."""
    seconds: float
    mb_per_second: float
    """Output of all ranks, by the time of the launch with its start and end."""
    lines_per_second: int
    of_srun: float | None
    """The share of what srun alone takes in the same round; None if that was not measured."""

    @property
    def met(self) -> bool:
        """True if every line is right or reported as lost, in at most twice the time of srun."""
        kept = self.right == self.expected or self.said
        return kept and (self.of_srun is None or self.of_srun >= TARGET)


def count(logs: Path, width: int) -> tuple[int, int]:
    """Return how many lines are right, and how many are in wrong places or not whole."""
    right = wrong = 0
    for path in logs.glob("*.out"):
        own = int(path.name.split(".")[-2])
        due = 0
        for raw in path.read_bytes().split(b"\n"):
            found = _LINE.match(raw)
            if found is None:
                wrong += b"line" in raw and b"rank" in raw
            elif (int(found[1]), int(found[2]), len(found[3])) == (own, due, due % width):
                right, due = right + 1, due + 1
            else:
                wrong, due = wrong + 1, max(due, int(found[2]) + 1)
    return right, wrong


def prepare(work: Path, env: Mapping[str, str], stager: str) -> Path:
    """Build a bundle of next to nothing; return the project."""
    project = work / "project"
    project.mkdir()
    (project / "stager.toml").write_text(SETTINGS)
    (project / "rank.py").write_text(RANK)
    _write_launcher(project / "torch-1.0-py3-none-any.whl")
    run(Command(argv=(stager, "build", "--no-prove", "-q"), cwd=project, env=env))
    return project


def _write_launcher(wheel: Path) -> None:
    """Make the wheel of the program that stands for torchrun."""
    content = {
        "torch/__init__.py": "",
        "torch/distributed/__init__.py": "",
        "torch/distributed/run.py": LAUNCHER,
        "torch-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n",
        "torch-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: stager\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "torch-1.0.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as archive:
        rows = []
        for name, text in content.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            rows.append(f"{name},sha256={digest.decode().rstrip('=')},{len(text.encode())}")
            archive.writestr(name, text)
        archive.writestr(record, "\n".join([*rows, f"{record},,", ""]))


def measure(
    asked: argparse.Namespace, cluster: Cluster, project: Path, env: Mapping[str, str]
) -> list[Counted]:
    """Run the jobs one after the other."""
    found = []
    for number in range(asked.rounds):
        for launcher in asked.launchers:
            logs = project.parent / f"logs-{launcher}-{number}"
            argv = (
                *("sh", "-c", _LIMITED, "limited", str(asked.open_files or ""), asked.stager),
                *("run", "--json", "--allocation", "slurm", "--nodes", str(asked.nodes)),
                *("--nproc-per-node", str(asked.ranks), "--launcher", launcher),
                *("--log-dir", str(logs), "--", "rank.py", str(asked.lines), str(asked.width)),
            )
            with choked(project.parent) if asked.choke else contextlib.nullcontext():
                ran = run(Command(argv=argv, cwd=project, env={**env, **cluster.env}))
            text, _, code = ran.out.rstrip("\n").rpartition("\n")
            report: dict[str, Any] = json.loads(text or "{}")
            right, wrong = count(logs, asked.width)
            expected = asked.nodes * asked.ranks * asked.lines
            taken = float(report.get("seconds", {}).get("launch", 0.0)) or ran.seconds
            rate = expected_bytes(asked) / taken / 1e6
            one = Counted(
                nodes=asked.nodes,
                launcher=launcher,
                expected=expected,
                right=right,
                wrong=wrong,
                lost=max(0, expected - right - wrong),
                said=bool(report.get("logs_lost")) or not report.get("ok"),
                code=int(code),
                seconds=round(ran.seconds, 1),
                mb_per_second=round(rate, 2),
                lines_per_second=round(expected / taken),
                of_srun=round(rate / alone(asked, cluster, project), 2) if asked.peer else None,
            )
            found.append(one)
            say(f"{launcher}, round {number + 1}: {one}")
            if not asked.keep:
                shutil.rmtree(logs)
    return found


def expected_bytes(asked: argparse.Namespace) -> int:
    """Return the bytes that all ranks print."""
    ranks, lines = int(asked.nodes) * int(asked.ranks), int(asked.lines)
    heads = lines * sum(len(f"rank {rank} line  \n") for rank in range(ranks))
    rest = sum(len(str(number)) + number % int(asked.width) for number in range(lines))
    return heads + ranks * rest


def alone(asked: argparse.Namespace, cluster: Cluster, project: Path) -> float:
    """Return the MB/s of srun alone, with the same ranks and one file for all of them.

    Raises:
        BenchError: not all of the output is there.
    """
    taken = project.parent / "alone.out"
    argv = (
        *("salloc", "--quiet", f"--nodes={asked.nodes}", f"--ntasks-per-node={asked.ranks}"),
        *("sh", "-c", _ALONE, "alone", str(asked.ranks), sys.executable),
        *(str(asked.lines), str(asked.width), str(taken)),
    )
    ran = run(Command(argv=argv, cwd=project, env={**os.environ, **cluster.env}))
    begin, end = map(float, ran.out.split())
    size, due = taken.stat().st_size, expected_bytes(asked)
    taken.unlink()
    if size != due:
        raise BenchError(f"srun alone wrote {size} bytes, the ranks {due}")
    rate = due / (end - begin) / 1e6
    say(f"srun alone: {rate:.2f} MB/s")
    return rate


@contextlib.contextmanager
def choked(work: Path) -> Iterator[None]:
    """Stop the drivers of jobs below a directory most of the time.

    Then Slurm always has something left to pass on when a task ends, as on a large machine.
    """
    over = threading.Event()

    def choke() -> None:
        while not over.wait(_CHOKED[0]):
            pids = _drivers(work)
            for number, seconds in ((signal.SIGSTOP, _CHOKED[1]), (signal.SIGCONT, 0.0)):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                over.wait(seconds)

    choking = threading.Thread(target=choke)
    choking.start()
    try:
        yield
    finally:
        over.set()
        choking.join()


def _drivers(work: Path) -> list[int]:
    """Find the processes that drive jobs of the store below a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"drive" in words and b"-S" in words and str(work).encode() in b" ".join(words):
                found.append(int(entry.name))
    return found


_CHOKED = (0.01, 0.1)
"""Seconds that a driver runs and is stopped."""
_LIMITED = 'if [ -n "$1" ]; then ulimit -n "$1"; fi; shift; "$@"; echo "$?"'
"""With so many open files and no more, then the exit status in a line of its own."""


def table(found: Sequence[Counted]) -> str:
    """Return the same for a person."""
    names = list(asdict(found[0])) if found else []
    rows = [names, *([str(value) for value in asdict(one).values()] for one in found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(names))]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True))
        for row in rows
    )


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.output", description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--lines", type=int, default=20_000, help="of each rank")
    parser.add_argument("--width", type=int, default=97, help="bytes of the longest line")
    parser.add_argument("--launchers", nargs="+", default=["srun", "torchrun"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--open-files", type=int, help="limit of open files, hard and soft")
    parser.add_argument("--peer", action="store_true", help="compare with srun alone")
    parser.add_argument("--choke", action="store_true", help="stop the driver most of the time")
    parser.add_argument("--keep", action="store_true", help="leave the logs")
    parser.add_argument("--stager", default=shutil.which("stager") or "stager")
    parser.add_argument("--work", type=Path, default=Path.home(), help="seen by all nodes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 where every line is right, or said to be lost, and the target is met."""
    asked = parse(argv)
    work = Path(tempfile.mkdtemp(prefix="stager-output-", dir=asked.work))
    env = {**os.environ, "OFFLINE_ROOT": str(work / "offline")}
    try:
        project = prepare(work, env, asked.stager)
        with running(asked.nodes, say, cpus=max(4, asked.ranks)) as cluster:
            found = measure(asked, cluster, project, env)
    except BenchError as exc:
        say(f"error: {exc}")
        return 1
    finally:
        if not asked.keep:
            shutil.rmtree(work, ignore_errors=True)
    say(table(found))
    print(json.dumps({"schema": 1, "jobs": [asdict(one) for one in found]}))
    return 0 if all(one.met for one in found) else 3


if __name__ == "__main__":
    sys.exit(main())
