"""The folder of a mirror: what is there stays, what is damaged is found, nothing is half done."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import pytest

from bundle.protocol.digest import Digest
from stager.carrying.mirror import MirrorResult, fill
from stager.carrying.mirror_folder import MARK, SUMS, describe_wheel
from stager.core.errors import SpaceError, StagerError, WheelError
from stager.core.files import replace_file
from stager.inventory.package_metadata import PackageMetadata, read_wheel_metadata
from tests.support.building import Recorder, digests, wheel_of
from tests.support.namespaces import namespace
from tests.support.wheelhouse import make_wheel

REPO = Path(__file__).resolve().parents[3]
FILL = """\
import json, os, signal
from pathlib import Path
from stager.carrying.mirror import fill
from stager.core.errors import StagerError
from tests.support.building import Recorder, wheel_of
def filled(root, folder):
    return fill(Path(root), [*map(wheel_of, sorted(Path(folder).glob("*.whl")))], (), Recorder())
"""
"""Filling a mirror in a process of its own."""


def filled(root: Path, *wheels: Path, built: bool = False) -> MirrorResult:
    names = {wheel.name for wheel in wheels} if built else set()
    return fill(root, [*map(wheel_of, wheels)], names, Recorder())


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Path]:
    """Four wheels, ``a`` in two versions."""
    folder = tmp_path / "made"
    return {
        "a1": make_wheel(folder, "a", "1.0"),
        "a2": make_wheel(folder, "a", "2.0", metadata_extra='Requires-Python: >=3.8, !=3.9.0,<"4'),
        "b": make_wheel(folder, "B.B", "1.0", metadata_extra="Requires-Python: <4,>=3.8"),
        "c": make_wheel(folder, "c", "1.0+x.1"),
    }


class Links(HTMLParser):
    """The links of a page, as an installer reads them."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[dict[str, str]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append({name: value or "" for name, value in attrs})


def listed(root: Path) -> dict[str, str]:
    """The digest of each wheel that the index lists; both forms must say the same, truly."""
    found = {}
    projects = [link["href"].rstrip("/") for link in Links(root / "simple/index.html").found]
    as_json = json.loads((root / "simple/index.json").read_text())
    assert [project["name"] for project in as_json["projects"]] == projects
    for project in projects:
        page = json.loads((root / f"simple/{project}/index.json").read_text())
        links = Links(root / f"simple/{project}/index.html").found
        for link, file in zip(links, page["files"], strict=True):
            url, _, digest = link["href"].partition("#sha256=")
            assert (url, digest) == (file["url"], file["hashes"]["sha256"])
            assert link.get("data-requires-python") == file.get("requires-python")
            wheel = root / "simple" / project / unquote(url)
            metadata = Path(f"{wheel}.metadata").read_bytes()
            said = hashlib.sha256(metadata).hexdigest()
            assert file["core-metadata"] == {"sha256": said}
            assert link["data-core-metadata"] == f"sha256={said}"
            # PEP 714: pip 22.3 to 23.1 takes the older spelling for a wheel's name and refuses it.
            assert not {"data-dist-info-metadata", "dist-info-metadata"} & {*link, *file}
            assert file["size"] == wheel.stat().st_size
            assert hashlib.sha256(wheel.read_bytes()).hexdigest() == digest
            found[wheel.resolve().name] = digest
    return found


def recorded(root: Path) -> dict[str, str]:
    lines = (root / SUMS).read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def state(root: Path) -> Mapping[Path, tuple[int, int]]:
    """When each file was written."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_is_there_stays(made: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "new" / "mirror"
    first = filled(root, made["a1"], made["b"])
    assert (first.packages, first.wheels, len(first.added)) == (2, 2, 2)
    assert first.bytes == sum(made[name].stat().st_size for name in ("a1", "b"))
    before = state(root)
    assert filled(root, made["a1"]).added == ()
    assert state(root) == before  # nothing was even written
    second = filled(root, made["a2"], made["c"])
    assert (second.packages, second.wheels, second.replaced) == (3, 4, ())
    assert listed(root) == recorded(root) == digests(tmp_path / "made")
    kept = {path: when for path, when in before.items() if path.suffix in (".whl", ".metadata")}
    assert kept.items() <= state(root).items()
    page = json.loads((root / "simple/b-b/index.json").read_text())
    assert (page["meta"], page["name"]) == ({"api-version": "1.1"}, "b-b")
    assert page["versions"] == ["1.0"]
    assert sorted(page["files"][0]["requires-python"].split(",")) == ["<4", ">=3.8"]
    files = json.loads((root / "simple/a/index.json").read_text())["files"]
    assert "requires-python" not in files[1]  # what was said is no specifier


def test_a_wheel_that_was_put_there_by_hand_or_taken_away(
    made: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "mirror"
    filled(root, made["a1"], made["b"])
    made["c"].rename(root / made["c"].name)
    (root / made["b"].name).unlink()
    again = filled(root, made["a1"])
    assert again.missing == (made["b"].name,)
    assert set(listed(root)) == {made["a1"].name, made["c"].name}
    assert not (root / "simple" / "b-b").exists()
    assert not (root / f"{made['b'].name}.metadata").exists()
    (root / "d-1.0-py3-none-any.whl").write_bytes(b"PK, but no zip")
    (root / "nothing.whl").write_bytes(b"")
    with pytest.raises(WheelError, match="2 wheels cannot be listed") as caught:
        filled(root, made["a1"])
    said = "\n".join(caught.value.context)
    assert "d-1.0-py3-none-any.whl: it cannot be read as a wheel" in said
    assert "nothing.whl: this is not the name of a wheel" in said


def test_damage_is_found_and_repaired(made: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "mirror"
    filled(root, made["a1"], made["b"], made["c"])
    for name in ("a1", "c"):
        damage(root / made[name].name)
    before = digests(root)
    with pytest.raises(WheelError) as caught:
        filled(root, made["a2"])
    assert [line.partition(": ")[0] for line in caught.value.context] == [
        made["a1"].name,
        made["c"].name,
    ]
    assert "`stager mirror DIR NAME==VERSION` replaces" in caught.value.hint
    assert digests(root) == before
    repaired = filled(root, made["a1"], made["c"])
    assert set(repaired.replaced) == {made["a1"].name, made["c"].name}
    assert len(listed(root)) == 3
    # All else follows from the wheels.
    for path in ("simple/index.html", "simple/a/index.json", f"{made['b'].name}.metadata"):
        damage(root / path)
    filled(root, made["a1"])
    assert len(listed(root)) == 3
    damage(root / SUMS)
    (root / SUMS).write_text("0" + (root / SUMS).read_text())
    with pytest.raises(StagerError, match=f"{SUMS} is damaged: line 1"):
        filled(root, made["a1"])


def test_another_file_of_the_same_name(made: dict[str, Path], tmp_path: Path) -> None:
    """An index has one file of a name for ever; what is built here may come out differently."""
    root = tmp_path / "mirror"
    filled(root, made["a1"])
    other = make_wheel(tmp_path / "other", "a", "1.0", files={"a.py": "NEW = 1\n"})
    before = digests(root)
    with pytest.raises(WheelError) as caught:
        filled(root, other)
    assert "the mirror has another file of this name" in caught.value.context[0]
    assert digests(root) == before
    assert filled(root, other, built=True).replaced == (other.name,)
    assert listed(root) == recorded(root)


def test_what_is_copied_must_be_what_was_fetched(made: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "mirror"
    asked = [wheel_of(made["b"])]
    with made["b"].open("ab") as file:
        file.write(b"more")
    with pytest.raises(WheelError, match="is damaged, or was changed just now"):
        fill(root, asked, (), Recorder())
    assert not list(root.glob("*.whl*"))


class Interrupting(Recorder):
    """Somebody who presses Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def step(self, what: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_an_interruption_leaves_nothing_wrong(made: dict[str, Path], tmp_path: Path) -> None:
    """Wherever it happens the index names what is there, and the next call completes it."""
    rebuilt = make_wheel(tmp_path / "other", "a", "1.0", files={"a.py": "NEW = 1\n"})
    asked = [*map(wheel_of, (rebuilt, made["a2"], made["c"]))]
    built = {wheel.path.name for wheel in asked}
    for steps in range(5):
        root = tmp_path / f"mirror{steps}"
        filled(root, made["a1"], made["b"])
        with pytest.raises(KeyboardInterrupt):
            fill(root, asked, built, Interrupting(steps))
        assert not list(root.rglob("*.part"))
        if steps < 4:  # the wheel of the old content is replaced last
            assert len(listed(root)) == 2
        unrelated = make_wheel(tmp_path / "made", "d")
        filled(root, unrelated)  # nothing of it is taken for damage
        fill(root, asked, built, Recorder())
        assert len(listed(root)) == 5
        assert listed(root) == recorded(root)


def test_a_process_that_was_killed(made: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "mirror"
    code = f"{FILL}Recorder.step = lambda *step: os.kill(os.getpid(), signal.SIGKILL)\n"
    code += f"filled({str(root)!r}, {str(made['a1'].parent)!r})\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (root / "simple").exists()
    left = replace_file(root / made["b"].name)  # as a process leaves it that is killed on the way
    left.__enter__().write(b"half of it")
    assert len(list(root.glob(".*.part"))) == 1
    filled(root, *made.values())
    assert len(listed(root)) == 4
    assert not list(root.glob(".*.part"))


def test_two_at_a_time(made: dict[str, Path], tmp_path: Path) -> None:
    root, other = tmp_path / "mirror", tmp_path / "other"
    others = [make_wheel(other, name) for name in ("p", "q", "r")]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", f"{FILL}filled({str(root)!r}, {str(place)!r})\n"], cwd=REPO
        )
        for place in (made["a1"].parent, other)
    ]
    assert [process.wait(300) for process in started] == [0, 0]
    assert set(listed(root)) == {path.name for path in (*others, *made.values())}
    assert listed(root) == recorded(root)


def test_a_directory_that_is_something_else_is_left_alone(
    made: dict[str, Path], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(StagerError, match="is not a mirror and is not empty"):
        filled(mine, made["a1"])
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    with pytest.raises(StagerError, match="cannot be used for a mirror: Not a directory"):
        filled(mine / "thesis.txt", made["a1"])
    empty = tmp_path / "empty"
    empty.mkdir()
    filled(empty, made["a1"])
    assert (empty / MARK).read_text().startswith("`stager mirror` keeps this folder")
    # Who may read is the umask's matter, though the offline root is its owner's alone.
    (empty / "other").touch()
    assert (empty / made["a1"].name).stat().st_mode == (empty / "other").stat().st_mode


def test_a_place_that_is_full_or_may_only_be_read(made: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "mirror"
    filled(root, made["b"])
    before = digests(root)
    large = make_wheel(tmp_path / "large", "large", files={"large": os.urandom(300_000)})
    code = f"""\
{FILL}
said = []
for root in ({str(root)!r}, {str(tmp_path / "full")!r}):
    try:
        filled(root, {str(large.parent)!r})
    except StagerError as exc:
        left = [path.name for path in Path(root).glob("*.whl*")]
        said.append([type(exc).__name__, exc.message, left])
print(json.dumps(said))
"""
    (tmp_path / "full").mkdir()
    mounts = f"mount --bind '{root}' '{root}'\nmount -o remount,ro,bind '{root}'\n"
    mounts += f"mount -t tmpfs -o size=128k none '{tmp_path / 'full'}'"
    read_only, full = namespace("-m", mounts, code)  # type: ignore[misc]
    assert read_only[:2] == [
        StagerError.__name__,
        f"the mirror cannot be written: {root / MARK}: Read-only file system",
    ]
    assert full == [
        SpaceError.__name__,
        f"no space left while writing {tmp_path / 'full' / large.name}",
        [],
    ]
    assert digests(root) == before


Held = TypeVar("Held")
NAME = "a-1.0-py3-none-any.whl"
LONG = 96 << 20


def wheel(folder: Path, compression: int, length: int = 0, claimed: int | None = None) -> Path:
    """A wheel whose METADATA has a long description, and claims to have another length."""
    path = folder / NAME
    head = b"Metadata-Version: 2.1\nName: a\nVersion: 1.0\n\n"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("a-1.0.dist-info/METADATA")
        info.compress_type = compression
        with archive.open(info, "w") as member:
            member.write(head)
            for _ in range(length >> 20):
                member.write(bytes(1 << 20))
        if claimed is not None:
            info.file_size = claimed
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=f"^{NAME}: it cannot be read as a wheel: ") as caught:
        describe_wheel(path, Digest.of(b""))
    return str(caught.value)


def allocated_by(work: Callable[[Held], object], held: Held) -> int:
    """The most bytes that were allocated at a time."""
    tracemalloc.start()
    try:
        work(held)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("compression", "claimed"),
    [
        (zipfile.ZIP_DEFLATED, None),
        (zipfile.ZIP_DEFLATED, 100),
        (zipfile.ZIP_BZIP2, None),
        (zipfile.ZIP_LZMA, 100),
    ],
)
def test_a_long_description_is_never_unpacked(
    tmp_path: Path, compression: int, claimed: int | None
) -> None:
    """A few kilobytes of file, and 96 MiB of text: none of it is held in memory."""
    path = wheel(tmp_path, compression, LONG, claimed)
    assert allocated_by(refusal, path) < LONG // 2
    data = path.read_bytes()
    assert allocated_by(read_wheel_metadata, data) < LONG // 2


def test_a_damaged_member_is_a_message_whatever_its_compression(tmp_path: Path) -> None:
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path = wheel(tmp_path, compression)
        data = bytearray(path.read_bytes())
        start = 30 + len("a-1.0.dist-info/METADATA")
        data[start + 4 : start + 9] = b"\xff" * 5
        path.write_bytes(data)
        assert refusal(path)
        assert read_wheel_metadata(bytes(data)) == PackageMetadata()
