"""The benchmark's own judgement, order and commands; and one whole small run with real tools."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bundle.format.archive import BundleFile

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks import building, cluster, peers, plan, starting, synthetic, tools, unpacking  # noqa: E402
from benchmarks.errors import BenchError  # noqa: E402
from benchmarks.place import GIB, Place, Room, scratch  # noqa: E402
from benchmarks.process import Command, run  # noqa: E402
from benchmarks.reference import CUDA, FULL, Reference, _settings, prepare  # noqa: E402
from benchmarks.report import Results, shown, verdict_cells  # noqa: E402
from benchmarks.rounds import Samples, Step, Value, interleave  # noqa: E402
from benchmarks.rows import ROWS, Row, chosen  # noqa: E402
from benchmarks.session import Session  # noqa: E402
from benchmarks.verdicts import Verdict, exit_status, judge  # noqa: E402


def sampled(**values: list[float]) -> Samples:
    samples = Samples()
    for name, found in values.items():
        for value in found:
            samples.add(name, Value(value=value))
    return samples


def row(target: float | None = 0.5, peer: str = "peer", slack: float = 0.0) -> Row:
    return Row(key="a", group="g", what="w", ours="ours", peer=peer, target=target, slack=slack)


# --- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("judged", "mine", "theirs", "state"),
    [
        (row(), [1.0, 9.0, 1.0], [2.0], "met"),  # medians: one slow round decides nothing
        (row(), [1.01], [2.0], "missed"),
        (row(), [0.0], [0.0], "met"),
        (row(), [1.0], [0.0], "missed"),
        (row(target=0, peer=""), [0.0], [], "met"),
        (row(target=0, peer=""), [1.0], [], "missed"),
        (row(1.0, slack=0.02), [1.02], [1.0], "met"),  # noise of two equal things
        (row(1.0, slack=0.02), [1.03], [1.0], "missed"),
    ],
)
def test_a_ratio_is_one_of_medians(
    judged: Row, mine: list[float], theirs: list[float], state: str
) -> None:
    (verdict,) = judge([judged], sampled(ours=mine, peer=theirs))
    assert verdict.state == state


@pytest.mark.parametrize(
    ("mine", "target", "judged", "status"),
    [
        ([1.0], 0.5, True, 0),
        ([2.0], 0.5, True, 1),
        ([2.0], 0.5, False, 0),  # another environment than the targets are for
        ([2.0], None, True, 0),
        ([], 0.5, True, 1),  # what was asked for was not measured
        ([], None, True, 0),
    ],
)
def test_a_missed_target_is_the_exit_status(
    mine: list[float], target: float | None, judged: bool, status: int
) -> None:
    assert (
        exit_status(judge([row(target)], sampled(ours=mine, peer=[2.0]), judged=judged)) == status
    )


def test_rows_have_keys_of_their_own_and_each_group_a_measurement() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {row.group for row in ROWS} == set(plan.MEASURES)


def test_which_rows_are_measured() -> None:
    def keys(**asked: Any) -> list[str]:
        return [row.key for row in plan.Options(scratch=Path(), **asked).rows()]

    def groups(**asked: Any) -> set[str]:
        return {row.group for row in plan.Options(scratch=Path(), **asked).rows()}

    assert [row.key for row in chosen(["size", "import"])] == ["size-gz", "size-zst", "import"]
    assert groups() == {row.group for row in ROWS} - {"slurm", "relay", "cuda"}
    assert groups(slurm=True) == groups() | {"slurm"}
    assert groups(quick=True) == set(plan.QUICK)
    assert groups(relay=True) == {"relay"}
    assert groups(cuda=True) == {"cuda"}
    assert {key.split("-")[1] for key in keys(relay=True, quick=True)} == {"2", "4"}
    assert keys(relay=True, quick=True, only=("relay-16-wire", "relay-2-sbcast")) == [
        "relay-2-sbcast"
    ]
    for asked, why in (
        ({"only": ("nonsense",)}, "'nonsense'"),
        ({"cuda": True, "slurm": True}, "by itself"),
        ({"cuda": True, "only": ("unpack",)}, "by itself"),
        ({"only": ("cuda-build-uv",)}, "the CUDA environment is measured by itself"),
        ({"only": ("relay-16-wire",)}, "by itself"),
        ({"relay": True, "only": ("unpack",)}, "nothing is left"),
    ):
        with pytest.raises(BenchError, match=why):
            keys(**asked)


def test_the_references_are_pinned_and_the_cuda_one_has_pypis_torch(tmp_path: Path) -> None:
    pins, plain = CUDA.pins(), FULL.pins()
    assert all(pin.count("==") == 1 for pin in pins)
    assert sum(pin not in plain for pin in FULL.changed_pins()) == 1
    assert "torch==2.13.0" in plain == pins[: len(plain)]
    assert all(pin.startswith(("cuda-", "nvidia-", "triton")) for pin in pins[len(plain) :])
    shutil.copytree(CUDA.folder, tmp_path / "project")
    _settings(tmp_path / "project", CUDA)
    text = (tmp_path / "project" / "stager.toml").read_text(encoding="utf-8")
    assert '\ntorch-backend = "none"\n' in text
    assert '\nimports = ["torch", "transformers", "datasets"]\n' in text


# --- rounds --------------------------------------------------------------------------------------


def test_steps_take_turns() -> None:
    seen: list[str] = []

    def step(name: str) -> Step:
        def measure() -> Value:
            seen.append(name)
            return Value(value=float(len(seen)), cpu=0.5)

        return Step(
            name=name,
            measure=measure,
            prepare=lambda: seen.append("+"),
            tidy=lambda: seen.append("-"),
        )

    samples, said = Samples(), list[str]()
    interleave([step("a"), step("b")], 3, samples, said.append)
    assert "".join(seen) == "+a-+b-" * 3
    assert samples.of("a") == (2.0, 8.0, 14.0)
    told = samples.to_json()["b"]
    assert (told["median"], told["min"], told["max"]) == (11.0, 5.0, 17.0)
    assert len(said) == 6


# --- commands ------------------------------------------------------------------------------------


def test_the_launcher_of_the_handout_is_a_script_that_parses() -> None:
    script = FULL.folder / "handout.sh"
    assert peers.handout(script, 3, 2) == ("bash", str(script), "3", "2")
    subprocess.run(["bash", "-n", str(script)], check=True)


# --- reading what comes back ---------------------------------------------------------------------

TRACE = """\
10 execve("/usr/bin/python", ["python", "-m", "torch.distributed.run", "run_wrapper.py"], 0x0) = 0
10 openat(AT_FDCWD, "/shared/a", O_RDONLY) = 3
11 execve("/env/bin/python", ["python", "run_wrapper.py", "x.py"], 0x0) = 0
11 openat(AT_FDCWD, "/shared/b", O_RDONLY) = 3
11 clone(child_stack=NULL, flags=SIGCHLD) = 12
12 stat("/shared", 0x0) = 0
12 stat("/sharedness", 0x0) = 0
13 stat("/shared/d", 0x0) = 0
"""


def test_only_the_calls_of_ranks_count() -> None:
    calls = list(starting.rank_calls(TRACE.splitlines()))
    assert len(calls) == 4
    shared = [Path("/elsewhere"), Path("/shared")]
    assert [starting.under(call, shared) for call in calls] == [True, False, True, False]


def test_a_job_without_a_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no result"):
        cluster.result_of(tmp_path)
    (tmp_path / "events.1.jsonl").write_text(
        '{"event": "job"}\n{"event": "result", "seconds": {"unpack": 2.5}, "bytes_broadcast": 7}\n'
    )
    assert cluster.result_of(tmp_path)["bytes_broadcast"] == 7


def test_values_are_short() -> None:
    assert shown(1.234, "seconds") == "1.23 s"
    assert shown(333_000_000, "bytes") == "333.0 MB"
    assert shown(71270, "count") == "71,270"
    missed = Verdict(row=row(), state="missed", ours=1.0, peer=1.0, figure=1.0)
    assert verdict_cells(missed)[2:] == ("1.00 s", "1.00 s", "1.000", "0.5", "MISSED")


# --- expected failures ---------------------------------------------------------------------------


def command(*argv: str, cwd: Path, until: str = "") -> Command:
    return Command(argv=argv, cwd=cwd, env={"PATH": "/usr/bin:/bin"}, until=until)


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as caught:
        run(command("sh", "-c", "echo broken >&2; exit 3", cwd=tmp_path))
    assert "exit status 3" in str(caught.value)
    assert "why: broken" in str(caught.value)
    with pytest.raises(BenchError, match="cannot be started"):
        run(command("no-such-program", cwd=tmp_path))
    with pytest.raises(BenchError, match="no line"):
        run(command("echo", "other", cwd=tmp_path, until="wanted"))
    ran = run(command("sh", "-c", "echo wanted; sleep 0.2", cwd=tmp_path, until="wanted"))
    assert ran.first is not None
    assert ran.first < ran.seconds


def test_scratch_is_gone_afterwards(tmp_path: Path) -> None:
    said: list[str] = []

    def interrupted() -> None:
        with scratch(tmp_path, Room(disk=1, memory=1), said.append) as place:
            (place.disk / "file").touch()
            (place.memory / "file").touch()
            kept.extend([place.disk, place.memory])
            raise KeyboardInterrupt

    kept: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(path.exists() for path in kept)
    assert str(kept[0]) in said[0]
    with (
        pytest.raises(BenchError, match="not enough room"),
        scratch(tmp_path, Room(disk=1 << 60, memory=GIB), said.append),
    ):
        pass


def test_what_was_measured_is_kept_when_a_later_group_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SimpleNamespace(
        prepared=SimpleNamespace(reference=FULL), rounds=1, samples=sampled(), pex=False
    )

    def fail(_: object) -> None:
        raise BenchError("it broke", where="here")

    measures = {
        "build": lambda _: session.samples.add("build/ours", Value(value=1.0)),
        "size": fail,
    }
    nothing: dict[str, Callable[..., object]] = {
        "need_programs": lambda *_: None,
        "hold_to": lambda cpus: cpus,
        "adopt_orphans": lambda: None,
        "scratch": lambda *_: contextlib.nullcontext(),
        "_session": lambda *_: session,
        "versions": lambda _: {},
    }
    for name, value in {"MEASURES": measures, **nothing}.items():
        monkeypatch.setattr(plan, name, value)
    kept: list[Results] = []
    options = plan.Options(scratch=tmp_path, only=("build", "size"))
    with pytest.raises(BenchError, match="it broke"):
        plan.carry_out(options, cast("tools.Tools", None), print, kept.append)
    (results,) = kept
    assert "build/ours" in results.samples


# --- synthetic wheels, and a whole run -----------------------------------------------------------


def test_synthetic_wheels_are_wheels(tmp_path: Path) -> None:
    shape = synthetic.Shape(packages=2, files=10, size=100_000)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        synthetic.make_wheels(shape, tmp_path / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    wheels = sorted((tmp_path / "one").iterdir())
    target = tmp_path / "target"
    subprocess.run([*pip, "--target", str(target), *map(str, wheels)], check=True, timeout=300)
    files = [path for path in target.glob("synthetic000/**/*") if path.suffix in (".py", ".bin")]
    assert len(files) == shape.files
    assert sum(path.stat().st_size for path in files) == pytest.approx(50_000, rel=0.2)
    for wheel in wheels:
        assert wheel.read_bytes() == (tmp_path / "two" / wheel.name).read_bytes()


def toy(folder: Path) -> Reference:
    folder.mkdir()
    (folder / "requirements.txt").write_text("alpha==1.0\nbeta==1.1\nmy-odd-name==1.0\n")
    (folder / "stager.toml").write_text(
        '[environment]\nrequirements = ["requirements.txt"]\nimports = ["alpha"]\n'
    )
    return Reference(name="toy", folder=folder, imports=("alpha", "beta"), changed=("beta", "2.0"))


@pytest.mark.needs("zstd")
@pytest.mark.usefixtures("index_env")
def test_a_small_environment_from_end_to_end(tmp_path: Path, zstandard_wheel: Path) -> None:
    """Real pip, uv, tar and stager; what they take is not looked at, that they agree is."""
    cache = tmp_path / "cache"
    (cache / "offline" / "wheels").mkdir(parents=True)
    shutil.copy(zstandard_wheel, cache / "offline" / "wheels")
    installed = tools.Tools(bin=Path(sys.executable).parent, base=tools.base_python())
    said: list[str] = []
    prepared = prepare(toy(tmp_path / "toy"), cache, installed, said.append)
    again = prepare(prepared.reference, cache, installed, said.append)
    assert [line for line in said if "locking" in line] == said  # twice, not four times
    assert len(said) == 2
    for name in ("disk", "memory"):
        (tmp_path / name).mkdir()
    place = Place(disk=tmp_path / "disk", memory=tmp_path / "memory")
    session = Session(
        place=place, tools=installed, prepared=again, rounds=1, say=said.append, pex=False
    )
    wanted = ("unpack/tmpfs/ours", "unpack/tmpfs/gz", "unpack/tmpfs/zst")
    building.measure(session)
    building.sizes(session)
    unpacking.measure(session, names=wanted)
    unpacking.restage(session)
    starting.imports(session)
    measured = set(session.samples.values)
    names = ("build/ours", "build/pip", "build/uv", "rebuild/same", "rebuild/one", "size/ours")
    assert measured >= {*names, *wanted, "restage/same", "restage/one", "import/ours"}
    changed = cluster.changed_bytes(session.made.bundles["first"], session.made.bundles["changed"])
    with BundleFile(str(session.made.bundles["changed"])) as whole:
        assert 0 < changed < whole.manifest.size
    assert not list(place.memory.iterdir())
    text = json.dumps(session.samples.to_json())
    assert "Infinity" not in text
