"""Two processes that play rounds, and the one that hands these out."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import stager

from . import isolation
from .registry import Area
from .rounds import NotHere, Round
from .world import prepared

Task = tuple[str, int]  # one round to be played: the area's name, and the round's number in it


@dataclass(frozen=True, kw_only=True)
class Played:
    area: str
    number: int
    outcome: str  # one of ``rounds.OUTCOMES``; ``absent`` where this machine cannot play it
    promise: str  # what was broken, or why it was not played
    counts: Mapping[str, int] = field(default_factory=dict)
    evidence: str = ""
    steps: list[str] = field(default_factory=list)
    seconds: float = 0.0


OnPlayed = Callable[[Played], None]


class Workers:
    """The processes; use it as a context manager, which ends them."""

    def __init__(self, place: Path, decompressor: Path, seed: int, chosen: Mapping[str, Area]):
        self._place, self._decompressor = place, decompressor
        self._seed, self._chosen = seed, chosen
        self._processes: dict[int, socket.socket] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        for connection in self._processes.values():
            with contextlib.suppress(OSError):  # that end is closed already
                connection.shutdown(socket.SHUT_RDWR)  # also where a reader still holds it open
            connection.close()
        for number in self._processes:
            os.waitpid(number, 0)

    def start(self, count: int, *, apart: bool = False) -> None:
        """Start some; with ``apart`` in the machine's own mounts, as what is started once needs."""
        for _ in range(count):
            here, there = socket.socketpair()
            number = os.fork()
            if number == 0:
                for other in (here, *self._processes.values()):
                    other.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this, by its end
                place = self._place / f"worker{len(self._processes)}{'-apart' if apart else ''}"
                make = partial(_Worker, place, self._decompressor, self._seed, self._chosen, apart)
                _serve(make, there)
            there.close()
            self._processes[number] = here

    def play(self, tasks: Iterator[Task], on_played: OnPlayed) -> None:
        with selectors.DefaultSelector() as selector:
            for number, connection in self._processes.items():
                selector.register(connection, selectors.EVENT_READ, (number, connection.makefile()))
            busy = len(self._processes)
            while busy:
                for key, _ in selector.select():
                    number, lines = key.data
                    line = lines.readline()
                    if not line:
                        raise RuntimeError(f"worker {number} has ended")
                    said = json.loads(line)
                    if said is not None:
                        on_played(Played(**said))
                    task = next(tasks, None)
                    if task is None:
                        busy -= 1
                        selector.unregister(key.fileobj)
                        continue
                    self._processes[number].sendall(json.dumps(task).encode() + b"\n")


class _Worker:
    def __init__(
        self, place: Path, decompressor: Path, seed: int, chosen: Mapping[str, Area], apart: bool
    ) -> None:
        self._seed, self._chosen = seed, chosen
        self._begun: set[str] = set()
        if not apart:  # what rounds share goes on after each of them
            isolation.adopt_orphans()
        self._own = not apart and isolation.own_mounts()
        place.mkdir()
        if self._own:
            isolation.mount_tmpfs(place, "mode=0755")
        os.environ["TMPDIR"] = str(place)
        # Once, not in each of its commands' forks.
        for module in pkgutil.walk_packages(stager.__path__, "stager."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        self._world = prepared(place, decompressor)
        self._world.owner = os.getpid()

    def play(self, name: str, number: int) -> dict[str, object]:
        area, folder = self._chosen[name], self._world.round_folder
        round_ = Round(name, self._seed, number, self._world, folder)
        told: dict[str, object]
        try:
            if area.root and not self._own and not area.apart:
                raise NotHere("only root can play it, where mount namespaces are allowed")
            if area.begin is not None and name not in self._begun:
                self._begun.add(name)  # before it is done: what there is of it is removed
                area.begin(self._world)
            told = isolation.play(area.play, round_, seconds=area.seconds, own=self._own)
        except NotHere as exc:
            told = {"outcome": "absent", "promise": str(exc)}
        finally:
            isolation.remove(folder)
        return {"area": name, "number": number, **told}

    def close(self) -> None:
        for name in self._begun:
            end = self._chosen[name].end
            if end is not None:
                end(self._world)


def _serve(make: Callable[[], _Worker], connection: socket.socket) -> None:
    """Play what is asked for until the connection ends; this process ends with it."""
    worker_: _Worker | None = None
    try:
        worker_ = make()
        with connection.makefile("rw") as talk:
            talk.write("null\n")
            talk.flush()
            for line in talk:
                talk.write(json.dumps(worker_.play(*json.loads(line))) + "\n")
                talk.flush()
    except (BrokenPipeError, ConnectionResetError):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            if worker_ is not None:
                worker_.close()
        finally:
            os._exit(0)
