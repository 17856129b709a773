"""Commands killed at any moment: their children end, and nothing is half done.

Neither the store nor the node holds anything half-written, and the same command succeeds
afterwards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass

from tests.support.processes import command_lines, stat_fields

from .. import checks
from ..deadline import Deadline
from ..product import BEFORE_OURS, REPO, Done, finish, sound, stager, start, succeeded
from ..registry import Area
from ..rounds import HEALED, SAME, Round, require
from ..world import ANSWER, EXEC, VERIFY


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    seconds: float  # about how long it takes, in units of the shortest command
    weight: int = 1  # how often it is chosen
    cold: bool = False  # whether it begins with an empty store and node root


_COMMANDS = (
    Command(("lock",), 4),
    Command(("build",), 10, 4, cold=True),
    Command(("build",), 3, 2),
    Command(VERIFY, 5, 3, cold=True),
    Command(VERIFY, 4),
    Command(("run", "--allocation", "local"), 6, 3),
    Command(EXEC, 3, 3, cold=True),
    Command(EXEC, 2),
    Command(("clean", "--all", "--allocation", "local"), 3, 2),
    Command(("script", "--launcher", "srun", "--", "train.py"), 2),
    Command(("inspect", "--files"), 1.5),
    Command(("logs",), 1.5),
    Command(("diagnose",), 1.5),
    Command(("report",), 2),
    Command(("support",), 2),
)
_SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def play(round_: Round) -> str:
    rng = round_.rng
    command = rng.choices(_COMMANDS, [one.weight for one in _COMMANDS])[0]
    if command.argv[0] == "run" and not round_.world.runs:
        command = _COMMANDS[3]
    name = command.argv[0]
    _prepare(round_, command)
    running = start(round_, command.argv)
    wait = rng.uniform(0, 1.1) * command.seconds * round_.world.unit
    time.sleep(wait)
    number, whole = rng.choice(_SIGNALS), rng.random() < 0.5
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if whole else os.kill)(running.pid, number)
    which = f"{number.name} to {'its group' if whole else 'it alone'} after {wait:.2f} s"
    round_.did(f"stager {name} (store {'cold' if command.cold else 'warm'}), {which}")
    ended = finish(running, 30)
    _ended(ended, number)
    _wait_for_children(running.pid)
    checks.whole_store(round_.offline, bundles=rng.random() < 0.5)
    again = sound(stager(round_, *command.argv, seconds=45))
    if name == "clean" and "there is no bundle" in again.err:  # all was done before
        succeeded(stager(round_, "build", "--no-prove"))
        again = sound(stager(round_, *command.argv, seconds=45))
    require(again.code == 0, "the same command succeeds afterwards", again)
    if name == "exec":
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
    early = ended.code == -signal.SIGINT and f'File "{REPO}/stager' not in ended.err
    early = early or ended.err.startswith(BEFORE_OURS)
    require("Traceback" not in ended.err or early, "no traceback", ended)
    # Python itself ends by the signal until the program has begun, and by SIGINT (which a shell
    # shows as 130) where an interrupt comes in the last moments.
    fine = {-number, 128 + number, 1, 3, 130, -signal.SIGINT}
    require(ended.code in fine, "a signal that asks ends it with its own exit code", ended)


def _wait_for_children(session: int) -> None:
    deadline = Deadline(15)
    while (left := _living(session)) and not deadline.passed():
        time.sleep(0.02)
    require(not left, "the children of a killed command end", "\n".join(left))


def _living(session: int) -> list[str]:
    found = []
    for number, line in command_lines():
        state, _, _, own, *_ = stat_fields(number) or ["Z"] * 4
        if state != "Z" and int(own) == session:
            found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


def _settled(round_: Round, command: Command) -> None:
    name = command.argv[0]
    if name in ("build", "lock", "clean"):
        checks.nothing_in_tmp(round_.offline)
    if name in ("verify", "run", "exec"):
        checks.nothing_half_written(round_.nodes)
    for path in (*round_.logs.glob("*"), *round_.project.glob("*")):
        half = path.name.endswith((".partial", ".tmp", ".new"))
        require(not half, "no half-written file is left", path)
    if name == "clean":
        succeeded(stager(round_, "build", "--no-prove"))
    if name != "build" or command.cold:
        checks.runs_right(round_)


AREA = Area(play, rounds=350, sample=1, seconds=120)
