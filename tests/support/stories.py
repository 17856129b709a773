"""Jobs for reports in tests: real ones without PyTorch, and files as a driver would leave them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from stager.logs.job_files import JobFiles, list_job_files
from tests.support.building import STAGER, Project
from tests.support.processes import until
from tests.support.small_torch import TORCH
from tests.support.wheelhouse import make_wheel

# --- real jobs -----------------------------------------------------------------------------------

# What the trainer says while it trains (trainer/engine/progress.py), without training.
TRAIN = """\
import json, os, pathlib, sys, time
rank, out = int(os.environ["RANK"]), pathlib.Path("out")
print(f"[RANK {rank}] WORLD_SIZE={os.environ['WORLD_SIZE']}", flush=True)
out.mkdir(exist_ok=True)
if rank == 0 and "metrics" in sys.argv:
    with (out / "metrics.jsonl").open("a") as file:
        for step in range(1, 61):
            values = {"loss": 2.3 / step ** 0.5, "lr": 0.1, "samples_per_second": 500.0 + step}
            file.write(json.dumps({"step": step, "epoch": step / 20, **values}) + "\\n")
            if step % 20 == 0:
                epoch = {"avg_loss": 2.4 / step ** 0.5, "accuracy": step / 100}
                file.write(json.dumps({"step": step, "epoch": step // 20, **epoch}) + "\\n")
time.sleep(600 if "sleep" in sys.argv else 0.3)
if "fail" in sys.argv:
    (out / f"done.{rank}").touch()
if rank == 1 and "fail" in sys.argv:
    done = [out / f"done.{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    while not all(path.exists() for path in done):  # else it would end those of other nodes
        time.sleep(0.02)
    raise ValueError("rank one is unhappy <b>")
"""


def trainable(project: Project) -> Project:
    files = {**TORCH, "torch/__init__.py": ""}
    make_wheel(project.root.parent / "wheelhouse", "torch", "2.0", files=files)
    more = 'torch-backend = "none"\n[project]\nname = "demo"\noutputs = ["out"]\n'
    project.settings("torch", "beta", more=more)
    (project.root / "train.py").write_text(TRAIN)
    project.build()
    return project


def ran(project: Project, *words: str, nodes: int = 2) -> dict[str, Any]:
    logs = project.root.parent / "logs"
    argv = ["run", "--json", "--allocation", "local", "--nodes", str(nodes)]
    argv += ["--nproc-per-node", "2"]
    done = project.stager(*argv, "--log-dir", str(logs), "--", "train.py", *words)
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


@contextmanager
def running(project: Project) -> Iterator[None]:
    """A real job whose ranks run as long as the block does; Ctrl-C ends it."""
    logs = project.root.parent / "logs"
    argv = [*STAGER, "run", "--allocation", "local", "--nodes", "2", "--log-dir", str(logs)]
    argv += ["--", "train.py", "sleep"]
    silent, place = subprocess.DEVNULL, project.root
    started = subprocess.Popen(
        argv, cwd=place, stdout=silent, stderr=silent, start_new_session=True
    )
    try:
        assert until(lambda: len(list(logs.glob("*.out"))) == 2 and _ranks(logs) == 2)
        yield
    finally:
        os.killpg(started.pid, signal.SIGINT)
        started.wait(300)


def _ranks(logs: Path) -> int:
    return sum("[RANK " in path.read_text() for path in logs.glob("*.out"))


def reported(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    logs = project.root.parent / "logs"
    return project.stager("report", "--log-dir", str(logs), *arguments)


# --- files as a driver leaves them ---------------------------------------------------------------

T0 = 1_790_000_000.0


@dataclass
class Told:
    folder: Path
    job_id: str = "77"
    clock: float = T0
    lines: list[str] = field(default_factory=list)

    def say(self, kind: str, after: float = 0.0, **fields: Any) -> Told:
        self.clock = round(self.clock + after, 3)
        event = {"v": 1, "job_id": self.job_id, "time": self.clock, "event": kind, **fields}
        self.lines.append(json.dumps(event))
        return self

    def phase(self, name: str, seconds: float, nodes: list[str], **fields: Any) -> Told:
        self.say("begin", phase=name)
        self.clock += seconds
        for node in nodes:
            self.answer(name, node, seconds, **fields)
        return self.say("end", phase=name, seconds=seconds)

    def answer(self, phase: str, node: str, seconds: float, **fields: Any) -> Told:
        """A node's answer, a good one if nothing else is said."""
        good = {"ok": True, "problems": [], **fields}
        return self.say(phase, phase=phase, node=node, seconds=seconds, **good)

    def write(self, **job: Any) -> JobFiles:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"events.{self.job_id}.jsonl"
        path.write_text("".join(f"{line}\n" for line in self.lines))
        launch = {"command": ["train.py"], "launcher": "torchrun", "backend": "auto"}
        told = {"v": 3, "id": self.job_id, "name": "demo", "action": "run", "launch": launch, **job}
        (self.folder / f"job.{self.job_id}.json").write_text(json.dumps(told))
        return list_job_files(self.folder, self.job_id)


def went_well(folder: Path, nodes: list[str], **result: Any) -> Told:
    """A job that went through all its phases on these nodes."""
    told = Told(folder).say("job", nodes=nodes, log_dir=str(folder))
    told.phase("preflight", 0.5, nodes).say("begin", phase="place")
    told.say("plan", why="nothing to send", bytes=0, groups=[]).say("end", phase="place", seconds=0)
    told.phase("unpack", 2.0, nodes, reused=False)
    probe = {"python": "3.11.7", "packages": {"torch": "2.13.0", "numpy": "2.4.6"}}
    told.phase("probe", 0.25, nodes, **probe, interface="eth0", address="10.0.0.1")
    told.say("begin", phase="launch")
    for node in nodes:
        told.say("started", 0.001, phase="launch", node=node, argv=[], interface="eth0")
    told.clock += 60
    for node in nodes:
        told.answer("launch", node, 60.0, exit_code=0)
    told.say("end", phase="launch", seconds=60.0)
    ending = {"ok": True, "problems": {}, "exit_codes": dict.fromkeys(nodes, 0), "failures": []}
    return told.say("result", world_size=2 * len(nodes), backend="gloo", **{**ending, **result})


HOSTILE = """<script>alert('x')</script>"><img src=x onerror=alert(1)>&lt;b&gt;"""
HOSTILE += "\x1b[31m\x00\u202e\ud83c"
LONG = "/very/long/" + "path-without-a-place-to-break/" * 6


def hostile(folder: Path, count: int = 60) -> Told:
    """A job that failed on many nodes, in which every text wants to be more than that."""
    nodes = [f"gpu-node-with-a-long-name-{number:03}" for number in range(1, count)] + [HOSTILE]
    told = Told(folder).say("job", nodes=nodes, log_dir=LONG)
    told.phase("preflight", 0.5, nodes).say("begin", phase="place")
    told.say("plan", why=HOSTILE, bytes=5_000_000, groups=[]).say("end", phase="place", seconds=0)
    told.say("begin", phase="unpack")
    told.say("sent", 4.0, bytes=5_000_000, seconds=4.0)
    for number, node in enumerate(nodes):
        told.answer("unpack", node, 5.0 + number * 0.05)
        told.clock += 0.05
    told.say("end", phase="unpack", seconds=8.0)
    packages = {HOSTILE: HOSTILE, "torch": "2.13.0", "transformers": "5.23.0", "numpy": "2.4.6"}
    probe = {"python": HOSTILE, "packages": packages, "interface": HOSTILE, "address": HOSTILE}
    told.phase("probe", 0.3, nodes, **probe).say("begin", phase="launch")
    for node in nodes:
        told.say("started", phase="launch", node=node, argv=[], interface="eth0")
    told.clock += 900
    record = {"node": HOSTILE, "rank": 2 * count - 1, "local_rank": 1, "exit_code": 1}
    record |= {"exception": "ValueError", "message": HOSTILE, "time": told.clock}
    record |= {"lines": ["Traceback (most recent call last):", HOSTILE, LONG * 3]}
    problem = {"what": HOSTILE, "where": HOSTILE, "why": LONG * 4, "fix": HOSTILE}
    for node in nodes[2:]:
        bad = {"ok": False, "exit_code": 137, "failures": [record], "problems": [problem]}
        told.answer("launch", node, 900.0, **bad)
    told.say("end", phase="launch", seconds=900.0)
    problems = {node: [problem] for node in nodes}
    exit_codes = dict.fromkeys(nodes, 137)
    ending = {"ok": False, "problems": problems, "exit_codes": exit_codes, "failures": [record]}
    told.say("result", world_size=2 * count, backend=HOSTILE, logs_fault=HOSTILE, **ending)
    name = f"demo.77.node<b>.{2 * count - 1}.out"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(f"{record['message']}\n".encode(errors="surrogatepass"))
    return told


# --- pages ---------------------------------------------------------------------------------------

_VOID = ("meta", "link", "br")


@dataclass
class Element:
    name: str
    given: dict[str, str]
    text: str = ""


class Parsed(HTMLParser):
    """A page as a parser sees it, which has to be well nested; ``elements`` in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        one = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(one)
        if tag not in _VOID:
            self._open.append(one)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().name == tag

    def handle_data(self, data: str) -> None:
        for one in self._open:
            one.text += data

    @property
    def title(self) -> str:
        return self.all("title")[0].text

    def all(self, name: str, **given: str) -> list[Element]:
        """The elements of a name that have these attributes; ``class_`` is one of its words."""

        def fits(one: Element, key: str, value: str) -> bool:
            if key == "class_":
                return value in one.given.get("class", "").split()
            return one.given.get(key.replace("_", "-")) == value

        named = [one for one in self.elements if one.name == name]
        return [one for one in named if all(fits(one, *pair) for pair in given.items())]

    def text(self, name: str, **given: str) -> str:
        (one,) = self.all(name, **given)
        return one.text

    def facts(self) -> dict[str, str]:
        pairs = zip(self.all("dt"), self.all("dd"), strict=True)
        return {term.text: told.text for term, told in pairs}
