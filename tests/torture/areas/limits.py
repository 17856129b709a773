"""Full disks at any byte, too few inodes, files too long, too few open files.

The command is refused with a message, nothing half-written is left, and with room enough the same
command succeeds.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import subprocess
from pathlib import Path

from .. import checks, isolation
from ..product import Done, Limits, refused, sound, stager
from ..registry import Area
from ..rounds import HEALED, REFUSED, SAME, Round, require
from ..world import EXEC, VERIFY

_PLENTY = "size=200m,nr_inodes=20000"


def play(round_: Round) -> str:
    return str(round_.rng.choice(_LIMITS)(round_))


def _store(round_: Round) -> str:
    """Let the store's file system fill up while a build writes to it."""
    round_.use("project", "home")
    _mount(round_, round_.offline, (6_000, 21_000), (30, 120))
    sound_wheels, wheels = round_.world.template / "offline" / "wheels", round_.offline / "wheels"
    try:
        shutil.copytree(sound_wheels, wheels)
    except (OSError, shutil.Error):
        shutil.rmtree(wheels, ignore_errors=True)
    (round_.project / "pylock.toml").unlink()
    done = _first(round_, "build", *round_.rng.choice(((), ("--no-prove",))))
    if wheels.is_dir() and (round_.rng.random() < 0.5 or done.code == 0):
        checks.whole_store(round_.offline)
    _grow(round_.offline)
    shutil.copytree(sound_wheels, wheels, dirs_exist_ok=True)
    _then(round_, "build", "--no-prove")
    checks.nothing_in_tmp(round_.offline)
    checks.runs_right(round_)
    return HEALED if done.code else SAME


def _nodes(round_: Round) -> str:
    """Let the node's file system fill up while an environment is unpacked."""
    round_.use("project", "offline", "home")
    _mount(round_, round_.nodes, (1, 5_000), (10, 330))
    argv = round_.rng.choice((EXEC, VERIFY))
    done = _first(round_, *argv)
    if done.code:
        checks.nothing_half_written(round_.nodes, "envs")
    _grow(round_.nodes)
    _then(round_, *argv)
    checks.nothing_half_written(round_.nodes)
    return REFUSED if done.code else SAME


def _logs(round_: Round) -> str:
    round_.use("project", "offline", "nodes")
    _mount(round_, round_.logs, (4, 120), (1, 12))
    done = _first(round_, *VERIFY)
    _grow(round_.logs)
    _then(round_, *VERIFY)
    return REFUSED if done.code else SAME


def _results(round_: Round) -> str:
    """Let the disk be full where a command writes its result."""
    round_.use("offline", "home", "nodes")
    _mount(round_, round_.project, (20, 80), (6, 20))
    round_.use("project")
    argv = round_.rng.choice(
        (("support",), ("report", "-o", "report.html"), ("lock",), ("support", "-o", "x.tar.gz"))
    )
    filler = round_.project / "filler"
    if argv[0] == "lock":
        (round_.project / "pylock.toml").unlink(missing_ok=True)
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as handle:
            while True:
                handle.write(bytes(1000))
    done = _first(round_, *argv)
    if done.code:
        results = [*round_.project.glob("*.tar.gz"), *round_.project.glob("*.html")]
        require(not results, "no result is left that is not whole", results)
    filler.unlink(missing_ok=True)
    _grow(round_.project)
    _then(round_, *argv)
    return REFUSED if done.code else SAME


def _file_size(round_: Round) -> str:
    # What it says goes to a file, too, and must fit.
    most = round_.rng.choice((20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000, 7_000_000))
    return _limited(round_, ((resource.RLIMIT_FSIZE, most),), f"files of {most} bytes at most")


def _open_files(round_: Round) -> str:
    most = round_.rng.randint(12, 64)
    return _limited(round_, ((resource.RLIMIT_NOFILE, most),), f"{most} open files at most")


def _limited(round_: Round, limits: Limits, what: str) -> str:
    round_.use("project", "offline", "home")
    argv = round_.rng.choice(
        (round_.rng.choice((EXEC, VERIFY)), ("build",), ("support",), ("report",), ("lock",),
         ("logs",))
    )  # fmt: skip
    if argv[0] == "build":
        shutil.rmtree(round_.offline / "layers")
        shutil.rmtree(round_.offline / "bundles")
    round_.did(what)
    done = _first(round_, *argv, limits=limits)
    if argv[0] in ("build", "exec", "verify"):
        checks.whole_store(round_.offline)
    _then(round_, *argv)
    if argv[0] in ("exec", "verify"):
        checks.nothing_half_written(round_.nodes)
    return REFUSED if done.code else SAME


def _mount(round_: Round, place: Path, kilobytes: tuple[int, int], inodes: tuple[int, int]) -> None:
    options = f"size=200m,nr_inodes={round_.rng.randint(*inodes)}"
    if round_.rng.random() < 0.7:
        size = round_.rng.randint(kilobytes[0] << 10, kilobytes[1] << 10)
        options = f"size={size},nr_inodes=20000"
    round_.did(f"{options} at {place.name}")
    isolation.mount_tmpfs(place, options)


def _first(round_: Round, *argv: str, limits: Limits = ()) -> Done:
    round_.did(f"stager {' '.join(argv)[:40]}")
    done = sound(stager(round_, *argv, limits=limits))
    if done.code:
        refused(done)
    return done


def _grow(place: Path) -> None:
    argv = ["mount", "-o", f"remount,{_PLENTY}", str(place)]
    subprocess.run(argv, check=True, capture_output=True)


def _then(round_: Round, *argv: str) -> None:
    done = sound(stager(round_, *argv))
    require(done.code == 0, "with room enough the same command succeeds", done)


_LIMITS = (_store, _nodes, _logs, _results, _file_size, _open_files)

AREA = Area(play, rounds=350, sample=1, seconds=120, root=True)
