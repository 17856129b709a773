"""What a node finds of a job's outputs, and the stream it makes of them."""

import hashlib
import io
import json
import os
import socket
import tarfile
import tempfile
from pathlib import Path

import pytest

from bundle.protocol.problem import NodeError
from bundle.results import stream as module
from bundle.results.selection import Sizes, is_link_outside, measure_entries, select_outputs
from bundle.results.stream import send_outputs
from tests.support.needs import needs


def packed(
    directory: Path, *outputs: str, stream: io.BytesIO | None = None
) -> tuple[dict, bytes, dict]:
    stream = stream or io.BytesIO()
    send_outputs(str(directory), outputs, stream)
    first, _, rest = stream.getvalue().partition(b"\n")
    start = rest.rindex(b'{"end"')
    return json.loads(first), rest[:start], json.loads(rest[start:])


def test_the_stream_is_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    (tmp_path / "out" / "a").write_bytes(b"x" * 700)
    (tmp_path / "out" / "sub" / ("n" * 200)).write_bytes(b"long")
    (tmp_path / "out" / "link").symlink_to("sub")
    (tmp_path / "log.txt").write_text("log")
    first, tar, last = packed(tmp_path, "out", "*.txt", "absent", "../up")
    assert first == {
        "results": 3,
        "roots": ["log.txt", "out"],
        "entries": 6,
        "files": 3,
        "bytes": 707,
        "missing": ["absent"],
        "left_out": {"../up": "it does not lie in the run directory"},
    }
    digest = hashlib.sha256(tar).hexdigest()
    assert last == {"end": 1, "sha256": digest, "changed": {}, "gaps": 0, "deleted": []}
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:  # the standard reader agrees
        names = ["log.txt", "out", "out/a", "out/link", "out/sub", "out/sub/" + "n" * 200]
        assert archive.getnames() == names
        assert archive.getmember("out/link").linkname == "sub"
    selected = select_outputs(str(tmp_path), ["out", "*.txt"])
    assert measure_entries(selected.entries) == Sizes(files=3, bytes=707, entries=6)


def test_outputs_inside_another_are_sent_once(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    (work / "out" / "a").touch()
    (work / "out.b").touch()
    assert select_outputs(str(work), ["out/a", "out", "**", "."]).roots == ("out", "out.b")


def test_what_is_no_file_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / "pipe")
    monkeypatch.chdir(out)  # a socket's path may have no more than 107 bytes
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    if os.geteuid() == 0:
        os.mknod(out / "null", 0o20666, os.makedev(1, 3))
    (out / "etc").symlink_to("/etc")
    (out / "up").symlink_to("../../x")
    (out / "kept").write_text("kept")
    chosen = select_outputs(str(tmp_path), ["out"])
    assert [entry.name for entry in chosen.entries] == ["out", "out/kept"]
    left = dict(chosen.left_out)
    assert left.pop("out/null", "it is a device") == "it is a device"
    assert left == {
        "out/pipe": "it is a named pipe",
        "out/socket": "it is a socket",
        "out/etc": "it is a link out of out, to /etc",
        "out/up": "it is a link out of out, to ../../x",
    }
    # A pipe nobody writes to does not hold anything up, even if it takes a file's place.
    first, _, last = packed(tmp_path, "out")
    assert first["left_out"] == chosen.left_out
    assert (last["changed"], last["gaps"]) == ({}, 0)  # none of it holds anything to keep


def test_links_that_stay_inside_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "a" / "b").mkdir(parents=True)
    (out / "a" / "file").touch()
    links = {
        "same": ("a/file", "a/file"),
        "a/up": ("../same", "../same"),
        "a/b/top": ("../..", "../.."),
        "absolute": (str(out / "a" / "file"), "a/file"),
        "dotted": ("./a/file", "a/file"),
        "slash": ("a/", "a"),
        "dangling": ("nothing", "nothing"),
        # Through a link and up: said without the link.
        "round": ("a/b/top/a", "a/b/top/a"),
        "winding": ("a/b/top/../out/a", "a"),
    }
    for name, (text, _) in links.items():
        (out / name).symlink_to(text)
    (out / "a" / "b" / "trick").symlink_to("top/..")  # by its text a/b, really the parent of out
    chosen = select_outputs(str(tmp_path), ["out"])
    found = {e.name[4:]: e.link for e in chosen.entries if e.link}
    assert found == {name: given for name, (_, given) in links.items()}
    assert list(chosen.left_out) == ["out/a/b/trick"]
    assert not any(is_link_outside(name, link) for name, link in found.items())


def test_an_output_that_is_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "work" / "runs" / "5").mkdir(parents=True)
    (tmp_path / "work" / "runs" / "5" / "model").write_text("model")
    (tmp_path / "outside").mkdir()
    work = tmp_path / "work"
    (work / "latest").symlink_to("runs/5")
    (work / "out").symlink_to(tmp_path / "outside")
    (work / "self").symlink_to(".")
    (work / "gone").symlink_to("nothing")
    chosen = select_outputs(str(work), ["latest", "out", "self", "gone"])
    assert [entry.name for entry in chosen.entries] == ["latest", "latest/model"]
    assert sorted(chosen.left_out) == ["gone", "out", "self"]
    assert str(tmp_path / "outside") in chosen.left_out["out"]
    # What a pattern finds behind such a link is outside as well.
    (tmp_path / "outside" / "secret").touch()
    assert select_outputs(str(work), ["out/*"]).entries == ()
    assert [e.name for e in select_outputs(str(work), ["latest/*"]).entries] == ["latest/model"]


def test_what_may_not_be_read_is_named() -> None:
    needs("root")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "out" / "closed").mkdir(parents=True)
        (folder / "out" / "mine").write_text("mine")
        (folder / "out" / "open").write_text("open")
        (folder / "out" / "mine").chmod(0o600)
        (folder / "out" / "closed").chmod(0o700)
        os.setresuid(65534, 65534, 0)
        try:
            chosen = select_outputs(name, ["out"])
        finally:
            os.setresuid(0, 0, 0)
    assert [entry.name for entry in chosen.entries] == ["out", "out/open"]
    closed, mine = "Permission denied", "this user may not read it"
    assert chosen.left_out == {"out/closed": closed, "out/mine": mine}
    assert chosen.unread == 2


class Meddler(io.BytesIO):
    """Does something to the files when so many bytes are written at once; 0: at first."""

    def __init__(self, meddle, size: int = 0) -> None:
        super().__init__()
        self._meddle, self._size = meddle, size

    def write(self, data) -> int:
        if self._meddle and self._size in (0, len(data)):
            meddle, self._meddle = self._meddle, None
            meddle()
        return super().write(data)


def test_files_that_change_are_sent_as_announced_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("grows", "piped", "same", "shrinks", "touched", "vanishes"):
        (out / name).write_bytes(b"1" * 1000)

    def meddle() -> None:
        (out / "grows").write_bytes(b"1" * 5000)
        (out / "shrinks").write_bytes(b"1" * 10)
        (out / "touched").write_bytes(b"2" * 1000)
        (out / "vanishes").unlink()
        (out / "piped").unlink()
        os.mkfifo(out / "piped")

    first, tar, last = packed(tmp_path, "out", stream=Meddler(meddle))
    assert first["bytes"] == 6000
    assert last["sha256"] == hashlib.sha256(tar).hexdigest()
    assert last["changed"] == {
        "out/grows": "it was written to while it was sent",
        "out/piped": "not sent: it is no longer a file",
        "out/shrinks": "it was written to while it was sent",
        "out/touched": "it was written to while it was sent",
        "out/vanishes": "not sent: No such file or directory",
    }
    assert last["gaps"] == 2
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        lengths = {m.name: m.size for m in archive.getmembers() if m.isreg()}
        assert archive.extractfile("out/same").read() == b"1" * 1000
    assert lengths == {"out/grows": 1000, "out/same": 1000, "out/shrinks": 10, "out/touched": 1000}


def test_a_file_cut_while_it_is_read_is_filled_up(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"1" * (3 * module.CHUNK + 100))

    stream = Meddler(lambda: os.truncate(big, module.CHUNK + 7), size=module.CHUNK)
    _, tar, last = packed(tmp_path, "big", stream=stream)
    assert last["changed"] == {
        "big": f"zeros stand in for the last {2 * module.CHUNK + 93:,} bytes: it became shorter"
    }
    assert last["gaps"] == 1
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        content = archive.extractfile("big").read()
    assert content == b"1" * (module.CHUNK + 7) + bytes(2 * module.CHUNK + 93)


def test_many_names_are_not_all_listed_and_a_directory_that_is_gone_is(tmp_path: Path) -> None:
    for number in range(1005):
        (tmp_path / f"l{number:04}").symlink_to("/")
    first, _, _ = packed(tmp_path, "*")
    assert len(first["left_out"]) == 1001
    assert first["left_out"]["..."] == "and 5 more"
    with pytest.raises(NodeError, match="outputs cannot be collected; it does not exist"):
        send_outputs(str(tmp_path / "gone"), ["out"], io.BytesIO())


def test_a_reader_that_takes_little_at_a_time_or_went_away(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(os.urandom(3 << 20))

    class Small(io.BytesIO):
        def write(self, data) -> int:
            return super().write(data[: 1 << 16])

    _, tar, last = packed(tmp_path, "out", stream=Small())
    assert len(tar) > 3 << 20
    assert last["sha256"] == hashlib.sha256(tar).hexdigest()
    reads, writes = os.pipe()
    os.close(reads)
    problem = pytest.raises(NodeError, match=r"outputs could not be sent.*Broken pipe")
    with problem, open(writes, "wb", buffering=0) as stream:
        send_outputs(str(tmp_path), ["out"], stream)
