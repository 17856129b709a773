"""Commands killed at any moment: afterwards the same command succeeds, and nothing is half done."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass

from .. import checks
from ..deadline import Deadline
from ..product import REPO, Done, finish, sound, stager, start
from ..registry import Area
from ..rounds import HEALED, SAME, Round, require
from ..world import ANSWER, PROGRAM


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that is killed."""

    argv: tuple[str, ...]
    """Its command line."""
    seconds: float
    """About how long it takes, in units of the shortest command."""
    cold: bool = False
    """Whether it begins with an empty store and node root."""
    weight: int = 1
    """How often it is chosen."""


_LOCAL = ("--allocation", "local")
_COMMANDS = (
    Command(argv=("lock",), seconds=4),
    Command(argv=("build",), seconds=10, cold=True, weight=4),
    Command(argv=("build",), seconds=3, weight=2),
    Command(argv=("verify", *_LOCAL), seconds=5, cold=True, weight=3),
    Command(argv=("verify", *_LOCAL), seconds=4),
    Command(argv=("run", *_LOCAL), seconds=6, weight=3),
    Command(argv=("exec", "--", "python", "-c", PROGRAM), seconds=3, cold=True, weight=3),
    Command(argv=("exec", "--", "python", "-c", PROGRAM), seconds=2),
    Command(argv=("clean", "--all", *_LOCAL), seconds=3, weight=2),
    Command(argv=("script", "--launcher", "srun", "--", "train.py"), seconds=2),
    Command(argv=("inspect", "--files"), seconds=1.5),
    Command(argv=("logs",), seconds=1.5),
    Command(argv=("diagnose",), seconds=1.5),
    Command(argv=("report",), seconds=2),
    Command(argv=("support",), seconds=2),
)
_SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def play(round_: Round) -> str:
    """Start a command, kill it after a while, and run it again."""
    rng = round_.rng
    command = rng.choices(_COMMANDS, [one.weight for one in _COMMANDS])[0]
    if command.argv[0] == "run" and not round_.world.runs:
        command = _COMMANDS[3]
    _prepare(round_, command)
    out = round_.folder / "said" / "killed"
    out.parent.mkdir()
    process = start(round_, command.argv, out=out)
    wait = rng.uniform(0, 1.1) * command.seconds * round_.world.unit
    time.sleep(wait)
    number = rng.choice(_SIGNALS)
    whole = rng.random() < 0.5
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if whole else os.kill)(process.pid, number)
    kind = "store cold" if command.cold else "store warm"
    which = "its group" if whole else "it alone"
    round_.did(f"stager {command.argv[0]} ({kind}), {number.name} to {which} after {wait:.2f} s")
    ended = finish(process, command.argv, out, 30)
    _ended(ended, number)
    _wait_for_children(process.pid)
    checks.whole_store(round_.offline, bundles=rng.random() < 0.5)
    again = sound(stager(round_, *command.argv, seconds=45))
    if command.argv[0] == "clean" and "there is no bundle" in again.err:  # all was done before
        require(stager(round_, "build", "--no-prove").code == 0, "it can be built anew")
        again = sound(stager(round_, *command.argv, seconds=45))
    require(again.code == 0, "the same command succeeds afterwards", again)
    if command.argv[0] == "exec":
        require(again.out == ANSWER, "what runs is what was built", again)
    _settled(round_, command)
    return SAME if ended.code == 0 else HEALED


def _prepare(round_: Round, command: Command) -> None:
    round_.use("project", "offline", "home", "nodes")
    if command.argv[0] == "build" and command.cold:
        round_.forget_builds()
        (round_.project / "pylock.toml").unlink()
    elif command.argv[0] == "build":
        (round_.project / "train.py").write_text(f"print({round_.number})\n")
    elif command.cold:
        shutil.rmtree(round_.nodes)
        round_.nodes.mkdir()


def _ended(ended: Done, number: signal.Signals) -> None:
    """Hold that what could end in its own way did: with an exit code, and no traceback."""
    if ended.code in (-signal.SIGKILL, 0):
        return
    # What Python says while it starts, before a line of ours has run, nobody can help.
    early = ended.code == -signal.SIGINT and f'File "{REPO}/' not in ended.err
    require("Traceback" not in ended.err or early, "no traceback", ended)
    # Python itself ends by the signal until the program has begun, and by SIGINT (which a shell
    # shows as 130) where an interrupt comes in the last moments.
    fine = {-number, 128 + number, 1, 3, 130, -signal.SIGINT}
    require(ended.code in fine, "a signal that asks ends it with its own exit code", ended)


def _wait_for_children(session: int) -> None:
    """Wait until all of a command's session has ended; hold that it does."""
    deadline = Deadline(15)
    left = _living(session)
    while left and not deadline.passed():
        time.sleep(0.02)
        left = _living(session)
    require(not left, "the children of a killed command end", "\n".join(left))


def _living(session: int) -> list[str]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                with open(f"/proc/{entry.name}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    with open(f"/proc/{entry.name}/cmdline") as line:
                        found.append(line.read().replace("\0", " "))
    return found


def _settled(round_: Round, command: Command) -> None:
    """Hold that nothing is left of either run."""
    if command.argv[0] in ("build", "lock", "clean"):
        checks.nothing_in_tmp(round_.offline)
    if command.argv[0] in ("verify", "run", "exec"):
        checks.nothing_half_written(round_.nodes)
    for path in (*round_.logs.glob("*"), *round_.project.glob("*")):
        half = path.name.endswith((".partial", ".tmp", ".new"))
        require(not half, "no half-written file is left", path)
    if command.argv[0] == "clean":
        require(stager(round_, "build", "--no-prove").code == 0, "it can be built anew")
    checks.runs_right(round_) if command.argv[0] != "build" or command.cold else None


AREA = Area(
    name="kills",
    promise="whatever moment a command is killed at, its children end, the store and the node hold "
    "nothing half-written, and the same command succeeds afterwards",
    play=play,
    rounds=350,
    sample=5,
    seconds=120,
)
