"""Full disks at any byte, too few inodes, files too long, too few open files."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path

from .. import checks, isolation
from ..product import Done, Limits, refused, sound, stager
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, Round, require
from ..world import PROGRAM

_LOCAL = ("--allocation", "local")
_PLENTY = "size=200m,nr_inodes=20000"


def play(round_: Round) -> str:
    """Let one resource end at a random amount, then give plenty of it."""
    kind = round_.rng.choice(sorted(_LIMITS))
    return _LIMITS[kind](round_)


def _offline(round_: Round) -> str:
    """Let the store's file system fill up while a build writes to it."""
    round_.use("project", "home")
    round_.nodes.mkdir()
    options = _amount(round_, (6_000, 21_000), (30, 120))
    isolation.mount_tmpfs(round_.offline, options)
    wheels = round_.offline / "wheels"
    try:
        shutil.copytree(round_.world.template / "offline" / "wheels", wheels)
    except (OSError, shutil.Error):
        shutil.rmtree(wheels, ignore_errors=True)
    (round_.project / "pylock.toml").unlink()
    done = _first(round_, "build", *round_.rng.choice(((), ("--no-prove",))))
    if round_.rng.random() < 0.5 or done.code == 0:
        checks.whole_store(round_.offline) if wheels.is_dir() else None
    _grow(round_.offline)
    wheels.mkdir(exist_ok=True)
    shutil.copytree(round_.world.template / "offline" / "wheels", wheels, dirs_exist_ok=True)
    _then(round_, "build", "--no-prove")
    checks.nothing_in_tmp(round_.offline)
    checks.runs_right(round_)
    return HEALED if done.code else SAME


def _nodes(round_: Round) -> str:
    """Let the node's file system fill up while an environment is unpacked."""
    round_.use("project", "offline", "home")
    isolation.mount_tmpfs(round_.nodes, _amount(round_, (1, 5_000), (10, 330)))
    argv = _unpacking(round_)
    done = _first(round_, *argv)
    if done.code:
        checks.nothing_half_written(round_.nodes, "envs")
    _grow(round_.nodes)
    _then(round_, *argv)
    checks.nothing_half_written(round_.nodes)
    return REFUSED if done.code else SAME


def _logs(round_: Round) -> str:
    """Let the file system of the logs fill up during a job."""
    round_.use("project", "offline", "nodes")
    options = _amount(round_, (4, 120), (1, 12))
    isolation.mount_tmpfs(round_.logs, options)
    done = _first(round_, "verify", *_LOCAL)
    _grow(round_.logs)
    _then(round_, "verify", *_LOCAL)
    return REFUSED if done.code else SAME


def _output(round_: Round) -> str:
    """Let the disk be full where a command writes its result."""
    round_.use("offline", "home", "nodes")
    isolation.mount_tmpfs(round_.project, _amount(round_, (20, 80), (6, 20)))
    shutil.copytree(round_.world.template / "project", round_.project, dirs_exist_ok=True)
    argv = round_.rng.choice(
        (("support",), ("report", "-o", "report.html"), ("lock",), ("support", "-o", "x.tar.gz"))
    )
    if argv[0] == "lock":
        (round_.project / "pylock.toml").unlink(missing_ok=True)
        filler = round_.project / "filler"
        try:
            with filler.open("wb") as handle:
                while True:
                    handle.write(bytes(1000))
                    handle.flush()
        except OSError:
            pass
    done = _first(round_, *argv)
    if done.code:
        results = [*round_.project.glob("*.tar.gz"), *round_.project.glob("*.html")]
        require(not results, "no result is left that is not whole", results)
    (round_.project / "filler").unlink(missing_ok=True)
    _grow(round_.project)
    _then(round_, *argv)
    return REFUSED if done.code else SAME


def _file_size(round_: Round) -> str:
    """Let no file become longer than so many bytes."""
    # What it says goes to a file, too, and must fit.
    most = round_.rng.choice((20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000, 7_000_000))
    return _limited(round_, ((resource.RLIMIT_FSIZE, most),), f"files of {most} bytes at most")


def _open_files(round_: Round) -> str:
    """Let only so many files be open at a time."""
    most = round_.rng.randint(12, 64)
    return _limited(round_, ((resource.RLIMIT_NOFILE, most),), f"{most} open files at most")


def _limited(round_: Round, limits: Limits, what: str) -> str:
    round_.use("project", "offline", "home")
    round_.nodes.mkdir()
    argv = round_.rng.choice(
        (_unpacking(round_), ("build",), ("support",), ("report",), ("lock",), ("logs",))
    )
    if argv[0] == "build":
        shutil.rmtree(round_.offline / "layers")
        shutil.rmtree(round_.offline / "bundles")
    round_.did(f"{what}: stager {argv[0]}")
    done = sound(stager(round_, *argv, limits=limits))
    if done.code:
        refused(done)
    if argv[0] in ("build", "exec", "verify"):
        checks.whole_store(round_.offline)
    _then(round_, *argv)
    if argv[0] in ("exec", "verify"):
        checks.nothing_half_written(round_.nodes)
    return REFUSED if done.code else SAME


def _unpacking(round_: Round) -> tuple[str, ...]:
    ways = (("exec", "--", "python", "-c", PROGRAM), ("verify", *_LOCAL))
    return round_.rng.choice(ways)


def _amount(round_: Round, kilobytes: tuple[int, int], inodes: tuple[int, int]) -> str:
    if round_.rng.random() < 0.7:
        size = round_.rng.randint(kilobytes[0] << 10, kilobytes[1] << 10)
        return f"size={size},nr_inodes=20000"
    return f"size=200m,nr_inodes={round_.rng.randint(*inodes)}"


def _first(round_: Round, *argv: str) -> Done:
    place = subprocess.run(
        ["findmnt", "-rno", "TARGET,OPTIONS", "-t", "tmpfs"], capture_output=True, text=True,
        check=False,
    ).stdout.splitlines()[-1:]  # fmt: skip
    round_.did(f"stager {' '.join(argv)[:40]}, with {' '.join(place)[-120:]}")
    done = sound(stager(round_, *argv))
    if done.code:
        refused(done)
    return done


def _grow(place: Path) -> None:
    argv = ["mount", "-o", f"remount,{_PLENTY}", str(place)]
    subprocess.run(argv, check=True, capture_output=True)


def _then(round_: Round, *argv: str) -> None:
    done = sound(stager(round_, *argv))
    require(done.code == 0, "with room enough the same command succeeds", done)


_LIMITS = {
    "the store": _offline,
    "the node": _nodes,
    "the logs": _logs,
    "results": _output,
    "file size": _file_size,
    "open files": _open_files,
}

AREA = Area(
    name="limits",
    promise="a disk that fills up at any byte, too few inodes or open files: refused with a "
    "message, nothing half-written is left, and with room enough the same command succeeds",
    play=play,
    rounds=350,
    sample=5,
    seconds=120,
    root=True,
)
