"""The benchmark's own judgement, order and commands; and one whole small run with real tools."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from bundle.format.archive import BundleFile

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks import building, cluster, starting, tools, unpacking  # noqa: E402
from benchmarks.errors import BenchError  # noqa: E402
from benchmarks.place import GIB, Place, Room, scratch  # noqa: E402
from benchmarks.process import Command, run  # noqa: E402
from benchmarks.reference import Reference, prepare  # noqa: E402
from benchmarks.rounds import Samples, Value  # noqa: E402
from benchmarks.rows import Row  # noqa: E402
from benchmarks.session import Session  # noqa: E402
from benchmarks.verdicts import exit_status, judge  # noqa: E402


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


# --- synthetic wheels, and a whole run -----------------------------------------------------------


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
