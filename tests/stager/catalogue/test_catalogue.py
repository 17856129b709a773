"""The catalogue explains lines of real logs, each entry by a sample."""

from __future__ import annotations

import functools
import random
import re
import string
from pathlib import Path
from typing import Any

import pytest
import tomllib
from typer.main import get_command

from bundle.protocol.enumerations import FailureClass
from stager.catalogue import catalogue
from stager.catalogue.catalogue import (
    CatalogueEntry,
    LineRole,
    LineTells,
    match_line,
)
from stager.cli import app, load_commands
from stager.diagnosis.diagnosis import diagnose
from stager.logs.job_files import LogFile, find_job_files
from stager.logs.lines import Line, LogReader, Suspects, select_errors

REPO = Path(__file__).resolve().parents[3]
TABLES = sorted((REPO / "stager/catalogue").glob("*.toml"))
SAMPLES = sorted((REPO / "tests/samples/failures").glob("*.txt"))
REQUIRED = {"needle", "class", "cause", "remedy", "source"}
OPTIONAL = {"pattern", "role", "tells", "over", "needs", "weak", "explains"}
HEADER = re.compile(
    r"# made: (?P<how>provoked with|written from) (?P<what>\S.*)\n# expect: (?P<expected>\S.*)\n"
)
FOREIGN = {
    *("--mem", "--exact", "--overlap", "--cpu-bind", "--kill-on-bad-exit", "--me"),  # Slurm
    *("--jobs", "--format", "--rdzv-id", "--nnodes"),  # sacct, torchrun
    *("--ntasks", "--ntasks-per-node", "--cpus-per-task", "--chdir", "--mpi"),  # Slurm
    *("--main", "--config", "--include", "--hostfile", "--launcher"),  # accelerate, DeepSpeed
    *("--allow-run-as-root", "--bind-to", "--map-by", "--oversubscribe", "--mca", "--host"),
    *("--address", "--head", "--gpus", "--local", "--local-rank"),  # Ray, Docker, PyTorch
    *("--node-rank", "--master-port", "--prtemca", "--previous", "--signal"),  # torchrun, kubectl
    *("--gpus-per-node", "--gres", "--shm-size", "--pids-limit"),  # Slurm, Docker
    "--out",  # the trainer's
}
"""Options of other programs that remedies name."""


@functools.cache
def raw() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        for name, fields in tomllib.loads(table.read_text(encoding="utf-8")).items():
            assert name not in found, f"{name} is in two tables"
            found[name] = fields
    return found


@functools.cache
def options(command: str | None = None) -> set[str]:
    """The options of a command of stager's; without one, of all."""
    load_commands()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    chosen = commands.values() if command is None else [commands[command]]
    return {opt for one in chosen for parameter in one.params for opt in parameter.opts}


@functools.cache
def settings() -> set[str]:
    """The keys of ``stager.toml``, as the template for a new one names them."""
    found, section = set(), ""
    for line in (REPO / "stager/config/template.toml").read_text(encoding="utf-8").splitlines():
        if header := re.fullmatch(r"\[([\w.]+)\]", line):
            section = header[1]
        elif key := re.match(r"(?:# )?([a-z-]+) = ", line):
            found.add(f"{section}.{key[1]}")
    assert {"assets.paths", "cluster.gpus-per-node"} <= found
    return found


def get_entry(name: str) -> CatalogueEntry:
    return next(known for known in catalogue.catalogue() if known.name == name)


def entry_of(sample: Path) -> CatalogueEntry:
    """A second sample of an entry has a number behind its name."""
    return get_entry(re.sub(r"-\d$", "", sample.stem))


def log_of(sample: Path) -> str:
    text = sample.read_text(encoding="utf-8")
    header = HEADER.match(text)
    assert header, sample
    return text[header.end() :]


def expected_of(sample: Path) -> dict[str, str]:
    header = HEADER.match(sample.read_text(encoding="utf-8"))
    assert header
    return dict(re.findall(r"(class|node|rank)=(\S+)", header["expected"]))


def test_there_are_enough() -> None:
    assert len(raw()) >= 45
    assert {one.name for one in catalogue.catalogue()} == set(raw())
    assert {entry_of(sample).name for sample in SAMPLES} == set(raw()), "one is without a sample"
    made = [HEADER.match(sample.read_text(encoding="utf-8")) for sample in SAMPLES]
    assert sum(header is not None and header["how"] == "provoked with" for header in made) >= 20


@pytest.mark.parametrize("name", sorted(raw()))
def test_an_entry_is_well_formed(name: str) -> None:
    fields = raw()[name]
    assert REQUIRED <= set(fields) <= REQUIRED | OPTIONAL
    texts = {key: value for key, value in fields.items() if key not in ("weak", "explains")}
    assert all(isinstance(value, str) and value for value in texts.values())
    assert fields.get("weak", True) is True
    assert name not in fields.get("explains", ())
    assert set(fields.get("explains", ())) <= set(raw())
    assert fields["class"] in set(FailureClass)
    assert fields.get("role", "cascade") in set(LineRole) - {LineRole.PRIMARY}
    assert fields.get("tells", "exit") in set(LineTells)
    assert fields.get("needs", name) in raw()
    for text in (fields["needle"], fields.get("over", "")):
        assert not re.search(r"\d", text), "a needle is looked for in lines without their digits"
    groups = {*get_entry(name).pattern.groupindex, "node"}
    for text in (fields["cause"], fields["remedy"]):
        assert not re.search(r"[.!?](?:\s|$)", text), "one sentence, without its full stop"
        assert {field for _, field, _, _ in string.Formatter().parse(text) if field} <= groups
    assert match_line("", [get_entry(name)]) is None
    assert get_entry(name).pattern.search("") is None


@pytest.mark.parametrize("name", sorted(raw()))
def test_what_a_remedy_names_exists(name: str) -> None:
    for text in (raw()[name]["remedy"], raw()[name]["cause"]):
        for code in re.findall(r"`stager ([^`]+)`", text):
            command, *arguments = code.split()
            assert {one for one in arguments if one.startswith("-")} <= options(command)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        assert named <= options() | FOREIGN
        sections = "environment|project|assets|cluster|launch"
        for key in re.findall(rf"\b((?:{sections})\.[a-z-]+)", text):
            assert key in settings()


def test_a_pattern_finds_nothing_without_its_needle() -> None:
    lines = {line for sample in SAMPLES for line in log_of(sample).splitlines()}
    for one in catalogue.catalogue():
        for line in lines:
            if one.pattern.search(line):
                assert one.needle in line, (one.name, line)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.stem)
def test_a_sample_shows_its_entry(sample: Path) -> None:
    """One of its lines is told by that entry, and not by one that stands before it."""
    text = log_of(sample)
    assert entry_of(sample) in {
        known.entry for known in map(match_line, text.splitlines()) if known
    }
    assert text.endswith("\n")
    assert not re.search(r"/work/|/tmp/v/|/root/", text), "a path of the machine it was made on"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.stem)
def test_a_sample_is_diagnosed(sample: Path, tmp_path: Path) -> None:
    (tmp_path / "slurm.out").write_text(log_of(sample), encoding="utf-8")
    first = diagnose(find_job_files(str(tmp_path), tmp_path)).first
    expected = expected_of(sample)
    if not expected:
        assert first is None
        return
    assert first.kind == expected["class"]
    assert first.node == expected.get("node", first.node)
    rank = "none" if first.rank is None else str(first.rank)
    assert rank == expected.get("rank", rank)
    assert first.hint


def test_warnings_of_python_are_no_causes() -> None:
    line = "x.py:54: UserWarning: {} /lib64/libm.so.6: version `GLIBC_2.29' not found (required by"
    assert match_line(line.replace("UserWarning: {}", "OSError:")) is not None
    assert match_line(line.format("not used:")) is None


def test_errors_are_the_same_as_in_all_lines(tmp_path: Path) -> None:
    chance = random.Random(7)
    mark = ("", "[rank0]: ", "[rank1]: ")
    lines = []
    for number in range(6_000):
        before = chance.choice(mark)
        stamp = f"2026-11-22 05:{number // 100:02}:00 " if chance.random() < 0.2 else ""
        lines.append(f"{stamp}{before}step {number} loss 0.5")
        if chance.random() < 0.03:
            lines += [f"{before}Traceback (most recent call last):"]
            lines += [f'{before}  File "x.py", line {number}'] * chance.randint(0, 30)
            lines += [f"{before}KeyError: {number}"] if chance.random() < 0.8 else []
        if chance.random() < 0.03:
            lines += [chance.choice(["srun: ERROR x", "a PANIC", "UserWarning: error", "Killed"])]
    path = tmp_path / "slurm.out"
    path.write_text("\n".join(lines) + "\n")
    log = LogFile(path=path)

    def told(found: list[Line]) -> list[tuple[int, str]]:
        return [(line.number, line.text) for line in found]

    picked = LogReader(log, Suspects())
    some = list(picked.read_rest())
    assert len(some) < len(lines) * 0.9
    assert told(list(select_errors(some))) == told(list(select_errors(LogReader(log).read_rest())))
