"""The benchmark's own judgement, order and commands; and one whole small run with real tools."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bundle.format.archive import BundleFile

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks import building, cluster, ours, peers, plan, starting, synthetic, tools, unpacking  # noqa: E402
from benchmarks.errors import BenchError  # noqa: E402
from benchmarks.place import GIB, Place, Room, scratch  # noqa: E402
from benchmarks.process import Command, run  # noqa: E402
from benchmarks.reference import CUDA, FULL, QUICK, Reference, _settings, prepare  # noqa: E402
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
    ("mine", "theirs", "state"),
    [
        ([1.0, 9.0, 1.0], [2.0], "met"),  # medians: one slow round decides nothing
        ([1.01], [2.0], "missed"),
        ([0.0], [0.0], "met"),
        ([1.0], [0.0], "missed"),
    ],
)
def test_a_ratio_is_one_of_medians(mine: list[float], theirs: list[float], state: str) -> None:
    (verdict,) = judge([row()], sampled(ours=mine, peer=theirs))
    assert verdict.state == state


def test_without_a_peer_the_value_itself_counts() -> None:
    none = row(target=0, peer="")
    assert judge([none], sampled(ours=[0.0]))[0].state == "met"
    assert judge([none], sampled(ours=[1.0]))[0].state == "missed"


def test_the_noise_of_two_equal_things_is_no_miss() -> None:
    assert judge([row(1.0, slack=0.02)], sampled(ours=[1.02], peer=[1.0]))[0].state == "met"
    assert judge([row(1.0, slack=0.02)], sampled(ours=[1.03], peer=[1.0]))[0].state == "missed"


@pytest.mark.parametrize(
    ("mine", "target", "judged", "status"),
    [
        (1.0, 0.5, True, 0),
        (2.0, 0.5, True, 1),
        (2.0, 0.5, False, 0),  # another environment than the targets are for
        (2.0, None, True, 0),
    ],
)
def test_a_missed_target_is_the_exit_status(
    mine: float, target: float | None, judged: bool, status: int
) -> None:
    samples = sampled(ours=[mine], peer=[2.0])
    verdicts = judge([row(target)], samples, judged=judged)
    assert exit_status(verdicts) == status
    results = Results(
        reference="r", rounds=1, cpus=2, verdicts=verdicts, samples=samples, versions={}
    )
    assert results.to_json()["missed"] == (["a"] if status else [])


def test_what_was_asked_for_and_not_measured_is_no_success() -> None:
    assert exit_status(judge([row()], Samples())) == 1
    assert exit_status(judge([row(None)], Samples())) == 0


def test_rows_have_keys_of_their_own_and_each_group_a_measurement() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {row.group for row in ROWS} == set(plan.MEASURES)


def test_rows_are_chosen_by_name_and_by_group() -> None:
    assert [row.key for row in chosen(["size", "import"])] == ["size-gz", "size-zst", "import"]
    assert chosen([]) == ROWS
    with pytest.raises(BenchError, match="'nonsense'"):
        plan.Options(scratch=Path(), only=("nonsense",)).rows()


def test_slurm_rows_are_measured_when_asked_for() -> None:
    def groups(**asked: bool) -> set[str]:
        return {row.group for row in plan.Options(scratch=Path(), **asked).rows()}

    assert groups() == {row.group for row in ROWS} - {"slurm", "relay", "cuda"}
    assert groups(slurm=True) == {row.group for row in ROWS} - {"relay", "cuda"}
    assert groups(quick=True) == set(plan.QUICK)
    assert groups(relay=True) == {"relay"}


def test_the_cuda_environment_is_measured_by_itself() -> None:
    options = plan.Options(scratch=Path(), cuda=True)
    assert {row.group for row in options.rows()} == {"cuda"}
    assert options.reference is CUDA
    for asked in ({"quick": True}, {"slurm": True}, {"curve": True}, {"only": ("unpack",)}):
        with pytest.raises(BenchError, match="by itself"):
            plan.Options(scratch=Path(), cuda=True, **asked).rows()  # type: ignore[arg-type]
    with pytest.raises(BenchError, match="the CUDA environment is measured by itself") as raised:
        plan.Options(scratch=Path(), only=("cuda-build-uv",)).rows()
    assert "--cuda" in str(raised.value)


def test_the_cuda_environment_is_the_reference_with_pypis_torch(tmp_path: Path) -> None:
    pins, plain = CUDA.pins(), FULL.pins()
    assert pins[: len(plain)] == plain
    assert "torch==2.13.0" in pins
    assert all(pin.startswith(("cuda-", "nvidia-", "triton")) for pin in pins[len(plain) :])
    shutil.copytree(CUDA.folder, tmp_path / "project")
    _settings(tmp_path / "project", CUDA)
    text = (tmp_path / "project" / "stager.toml").read_text(encoding="utf-8")
    assert '\ntorch-backend = "none"\n' in text
    assert '\nimports = ["torch", "transformers", "datasets"]\n' in text


def test_the_relay_is_measured_by_itself() -> None:
    def keys(**asked: object) -> list[str]:
        options = plan.Options(scratch=Path(), **asked)  # type: ignore[arg-type]
        return [row.key for row in options.rows()]

    assert keys(relay=True, only=("relay-16-wire", "relay-2-sbcast"), quick=True) == [
        "relay-2-sbcast"
    ]
    quick = keys(relay=True, quick=True)
    assert {key.split("-")[1] for key in quick} == {"2", "4"}
    everything = keys(relay=True)
    assert [key for key in everything if key.endswith("-wire")] == [
        f"relay-{nodes}-wire" for nodes in (1, 2, 4, 8, 16, 32)
    ]
    assert "relay-16-sbcast" in everything
    assert "relay-32-sbcast" not in everything
    with pytest.raises(BenchError, match="nothing is left"):
        keys(relay=True, only=("unpack",))
    with pytest.raises(BenchError, match="by itself"):
        keys(only=("relay-16-wire",))


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
    assert samples.to_json()["b"] == {
        "median": 11.0,
        "min": 5.0,
        "max": 17.0,
        "values": [5.0, 11.0, 17.0],
        "cpu_seconds": [0.5, 0.5, 0.5],
    }
    assert len(said) == 6


# --- commands ------------------------------------------------------------------------------------


def test_on_slurm_everything_is_sent() -> None:
    job = ours.Job(allocation="slurm", nodes=3, ranks=2, bundle=Path("/b"), logs=Path("/l"))
    assert " ".join(ours.run("stager", job, "a.py")) == (
        "stager run --allocation slurm --nodes 3 --stage always --bundle /b --log-dir /l "
        "--nproc-per-node 2 -- a.py"
    )


def test_the_launcher_of_the_handout_is_a_script_that_parses() -> None:
    script = FULL.folder / "handout.sh"
    assert peers.handout(script, 3, 2) == ("bash", str(script), "3", "2")
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_reference_is_pinned_throughout() -> None:
    pins = FULL.pins()
    assert len(pins) in (47, 48)
    assert "torch==2.13.0" in pins
    assert all(pin.count("==") == 1 for pin in pins)
    assert sum(pin not in pins for pin in FULL.changed_pins()) == 1
    assert QUICK.reduced
    assert not any(pin.startswith("torch==") for pin in QUICK.pins())


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


def test_the_first_line_is_timed(tmp_path: Path) -> None:
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


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tools.PROGRAMS, "no-such-program", "nowhere")
    with pytest.raises(BenchError) as caught:
        tools.need_programs(["tar", "no-such-program"], {}, print)
    assert "not found: no-such-program" in str(caught.value)
    assert "apt-get install nowhere" in str(caught.value)


def test_a_local_cluster_needs_its_programs_and_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out before anything is measured."""
    assert {"tar", "slurmctld", "munged"} <= set(plan._programs(["build", "slurm"]))
    monkeypatch.setattr(plan.os, "geteuid", lambda: 1000)
    plan._need_root(["build"])
    with pytest.raises(BenchError, match="by root alone"):
        plan._need_root(["build", "slurm"])


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


def test_the_command_line_explains_itself() -> None:
    spec = importlib.util.spec_from_file_location("bench", REPO / "scripts" / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    assert bench.parser().parse_args(["--relay", "--quick"]).relay
    asked = bench.parser().parse_args(["--only", "unpack", "size", "--rounds", "2", "--chart"])
    assert (asked.only, asked.rounds, asked.chart) == (["unpack", "size"], 2, bench.CHART)
    with pytest.raises(SystemExit) as ended:
        bench.parser().parse_args(["--rounds", "0"])
    assert ended.value.code == 2
