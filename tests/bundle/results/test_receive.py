"""Results come home through real pipes, whole, cut or forged."""

import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bundle.protocol.problem import NodeError
from bundle.results.publish import remove_abandoned
from bundle.results.receive import Received, receive_outputs
from bundle.results.selection import measure_entries, select_outputs
from bundle.results.stream import send_outputs
from tests.support.namespaces import namespace
from tests.support.needs import needs
from tests.support.processes import until

REPO = Path(__file__).resolve().parents[3]
SENDER = """
import sys
sys.path.insert(0, sys.argv[1])
from bundle.results.stream import send_outputs
send_outputs(sys.argv[2], sys.argv[3:], sys.stdout.buffer)
print(open("/proc/self/status").read(), file=sys.stderr)
"""
RECEIVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from bundle.results.receive import receive_outputs
got = receive_outputs(sys.stdin.buffer, sys.argv[2], sys.argv[3:])
print(json.dumps([got.complete, got.bytes, open("/proc/self/status").read()]))
"""
ISOLATED = (sys.executable, "-I", "-S", "-c")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Where ranks ran: an output with a bit of everything, and a log."""
    work = tmp_path / "work"
    out = work / "out"
    (out / "sub" / "empty").mkdir(parents=True)
    (out / "model.bin").write_bytes(os.urandom(3 << 20))
    (out / "sub" / "größe 重.json").write_text("{}")
    (out / os.fsdecode(b"not utf-8 \xff\n")).write_text("bytes")
    (out / "sub" / ("n" * 250)).write_text("long")
    (out / "run.sh").write_text("#!/bin/sh\n")
    (out / "run.sh").chmod(0o4755)
    (out / "sub" / "read-only").write_text("ro")
    (out / "sub" / "read-only").chmod(0o440)
    (out / "best").symlink_to("model.bin")
    os.link(out / "model.bin", out / "zz-same")
    (work / "log.txt").write_text("log\n")
    os.utime(out / "model.bin", (1_000_000_000, 1_000_000_000))
    (out / "sub").chmod(0o550)
    os.utime(out / "sub", (1_100_000_000, 1_100_000_000))
    return work


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


def stream_of(work: Path, *outputs: str) -> bytes:
    stream = io.BytesIO()
    send_outputs(str(work), outputs, stream)
    return stream.getvalue()


def take(data: bytes, home: Path, *outputs: str) -> Received:
    return receive_outputs(io.BytesIO(data), str(home), outputs, "hpc07:/tmp/work")


def tree(folder: Path) -> dict[str, tuple]:
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        if path.is_symlink():
            facts = ("link", os.readlink(path))
        else:
            content = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
            kind = "folder" if path.is_dir() else "file"
            facts = (kind, stat.S_IMODE(state.st_mode), int(state.st_mtime), content)
        found[str(path.relative_to(folder))] = facts
    return found


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- whole ---------------------------------------------------------------------------------------


def test_results_come_home_through_a_process(work: Path, home: Path) -> None:
    argv = [*ISOLATED, SENDER, str(REPO), str(work), "out", "*.txt", "none"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as sender:
        got = receive_outputs(sender.stdout, str(home), ["out", "*.txt", "none"])
    assert sender.returncode == 0
    wanted = tree(work)
    kind, _, *rest = wanted["out/run.sh"]
    wanted["out/run.sh"] = (kind, 0o755, *rest)  # set-uid stays behind
    assert tree(home) == wanted
    found = measure_entries(select_outputs(str(work), ["out", "*.txt"]).entries)
    assert got == Received(
        complete=True,
        files=found.files,
        bytes=found.bytes,
        names=frozenset(name for name, (kind, *_) in wanted.items() if kind != "folder"),
        placed=("log.txt", "out"),
        missing=("none",),
    )
    assert names(home) == ["log.txt", "out"]


def test_an_output_that_would_replace_a_file_gets_a_number(work: Path, home: Path) -> None:
    (home / "out").mkdir()
    (home / "out" / "model.bin").write_text("mine")
    (home / "out.1").symlink_to("/nowhere")
    (home / "log.txt").write_text("mine")
    data = stream_of(work, "out", "log.txt")
    got = take(data, home, "out", "log.txt")
    assert got.complete
    assert got.placed == ("log.txt.1", "out.2")
    assert got.renamed == {"out": "out.2", "log.txt": "log.txt.1"}
    assert names(home) == ["log.txt", "log.txt.1", "out", "out.1", "out.2"]
    assert names(home / "out") == ["model.bin"]
    assert (home / "log.txt").read_text() == "mine"
    assert (home / "out.2" / "best").resolve() == home / "out.2" / "model.bin"
    assert take(data, home, "out", "log.txt").placed == ("log.txt.2", "out.3")


def test_a_user_without_privileges_gets_closed_directories_home(work: Path) -> None:
    needs("root")
    (work / "out").chmod(0o550)
    data = stream_of(work, "out")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, 65534, 65534)
        os.setresuid(65534, 65534, 0)
        try:
            whole, cut = (take(part, folder, "out") for part in (data, data[:-2000]))
        finally:
            os.setresuid(0, 0, 0)
        assert whole.placed == ("out",)
        assert not cut.complete
        assert names(folder) == ["out", "out.partial"]
        assert (folder / "out").stat().st_uid == 65534
        assert tree(folder / "out").keys() == tree(work / "out").keys()
        for closed in ("out", "out/sub"):
            assert stat.S_IMODE((folder / closed).stat().st_mode) == 0o550


def test_outputs_further_down_join_what_is_there(work: Path, home: Path) -> None:
    (work / "runs" / "5").mkdir(parents=True)
    (work / "runs" / "5" / "model").write_text("5")
    (work / "runs" / "6").mkdir()
    (home / "runs" / "5").mkdir(parents=True)
    data = stream_of(work, "runs/*")
    assert take(data, home, "runs/*").placed == ("runs/5", "runs/6")
    assert names(home / "runs" / "5") == ["model"]
    # A link is not followed, wherever it leads, nor does a file give way.
    (home / "runs").rename(home / "elsewhere")
    (home / "runs").symlink_to("elsewhere")
    (home / "runs.1").touch()
    assert take(data, home, "runs/*").placed == ("runs.2/5", "runs.2/6")
    assert names(home / "elsewhere") == ["5", "6"]


def test_what_the_node_says_of_changes_is_handed_on(work: Path, home: Path) -> None:
    class Growing(io.BytesIO):
        def write(self, data) -> int:
            with open(work / "log.txt", "a") as log:
                log.write("more\n")
            return super().write(data)

    stream = Growing()
    send_outputs(str(work), ["log.txt", "none", "../x"], stream)
    got = take(stream.getvalue(), home, "log.txt")
    assert got.complete
    assert got.changed == {"log.txt": "it was written to while it was sent"}
    assert (got.placed, got.missing) == (("log.txt",), ("none",))
    assert got.left_out == {"../x": "it does not lie in the run directory"}
    assert (home / "log.txt").read_text() == "log\n"


def test_a_large_file_takes_little_memory(tmp_path: Path, home: Path) -> None:
    big = tmp_path / "work" / "big"
    big.parent.mkdir()
    with open(big, "wb") as file:
        file.truncate(150 << 20)
        for place in (0, 123_456_789, (150 << 20) - 4):
            file.seek(place)
            file.write(b"mark")
    argv = [*ISOLATED, SENDER, str(REPO), str(big.parent), "big"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
        argv = [*ISOLATED, RECEIVER, str(REPO), str(home), "big"]
        done = subprocess.run(argv, stdin=sender.stdout, capture_output=True, check=True)
        sent_with = sender.stderr.read().decode()
    complete, size, received_with = json.loads(done.stdout)
    assert (complete, size) == (True, 150 << 20)
    for status in (sent_with, received_with):
        assert int(re.search(r"VmHWM:\s+([0-9]+) kB", status)[1]) < 64 << 10
    assert subprocess.run(["cmp", str(big), str(home / "big")], check=False).returncode == 0


# --- cut -----------------------------------------------------------------------------------------


def test_a_stream_cut_anywhere_loses_no_file_that_arrived(tmp_path: Path, home: Path) -> None:
    out = tmp_path / "work" / "out"
    (out / "sub").mkdir(parents=True)
    for name in ("a", "b", "sub/c"):
        (out / name).write_bytes(name.encode() * 600)
    data = stream_of(out.parent, "out")
    head = data.index(b"\n") + 1
    # Members: out, a, b, sub, c; a header of 512 bytes each, and 1024 or 2048 of content.
    ends = {"a": head + 512 + 512 + 600, "b": head + 512 + 1536 + 512 + 600}
    ends["sub/c"] = head + 512 + 1536 * 2 + 512 + 512 + 3000
    cuts = {0, 1, head - 1, len(data) - 2, len(data) - 1, *range(head, len(data), 97)}
    for end in ends.values():
        cuts |= {end - 1, end, end + 1}
    for cut in sorted(cuts):
        place = home / str(cut)
        place.mkdir()
        if cut < head:
            with pytest.raises(NodeError, match="no results arrived; it ended before its end mark"):
                take(data[:cut], place, "out")
            assert names(place) == []
            continue
        got = take(data[:cut], place, "out")
        arrived = [name for name, end in ends.items() if cut >= end]
        assert not got.complete
        assert got.files == len(arrived)
        assert [p.what for p in got.problems] == ["the results are not complete"]
        assert "the stream was cut" in got.problems[0].why
        assert got.problems[0].where == "hpc07:/tmp/work"
        assert names(place) == (["out.partial"] if arrived else [])
        for name in arrived:
            assert (place / "out.partial" / name).read_bytes() == name.encode() * 600
        files = [p for p in place.rglob("*") if p.is_file()]
        assert len(files) == len(arrived)
    assert take(data, home, "out").complete


def test_partial_results_do_not_touch_each_other(work: Path, home: Path) -> None:
    data = stream_of(work, "out", "log.txt")[:-1]
    first, second = (take(data, home, "out", "log.txt") for _ in range(2))
    assert first.renamed == {"out": "out.partial", "log.txt": "log.txt.partial"}
    assert second.renamed == {"out": "out.partial.1", "log.txt": "log.txt.partial.1"}


def test_a_killed_receiver_leaves_what_the_next_one_sweeps(work: Path, home: Path) -> None:
    argv = [*ISOLATED, RECEIVER, str(REPO), str(home), "out"]
    data = stream_of(work, "out")
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as receiver:
        receiver.stdin.write(data[:-200])
        receiver.stdin.flush()
        assert until(lambda: bool(list(home.glob(".stager*/0/model.bin"))))
        # While it lives nobody takes anything from it.
        remove_abandoned(str(home))
        assert len(names(home)) == 1
        receiver.kill()
        receiver.stdin.close()
    (left,) = names(home)
    assert left.startswith(".stager-results.")
    # Of other machines nobody knows whether the process lives, unless it is a week old.
    other = home / f".stager-results.elsewhere-1.{receiver.pid}.5"
    old = home / f".stager-results.elsewhere-1.{receiver.pid}.6"
    for folder in (other, old):
        (folder / "0").mkdir(parents=True)
    os.utime(old, (time.time() - 8 * 86400,) * 2)
    assert take(data, home, "out").placed == ("out",)
    assert names(home) == [other.name, "out"]


# --- forged --------------------------------------------------------------------------------------


def forged(members: Sequence[tuple], **header: object) -> bytes:
    """A stream as somebody hostile would make it: names, types and contents as they like."""
    tar = b""
    for name, kind, content, *more in members:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, len(content)
        info.mode = 0o755 if kind == DIR else 0o644
        if kind == DIR and more:
            info.mode, info.mtime = more
        elif more:
            info.linkname = more[0]
        tar += info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)
    tar += bytes(1024)
    first = {"results": 3, "roots": ["out"], "entries": 100, "files": 100, "bytes": 1000}
    first = {**first, "missing": [], "left_out": {}, **header}
    last = {"end": 1, "sha256": hashlib.sha256(tar).hexdigest(), "changed": {}, "gaps": 0}
    return json.dumps(first).encode() + b"\n" + tar + json.dumps(last).encode() + b"\n"


DIR, REG, SYM = tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE
GOOD = [("out", DIR, b""), ("out/good", REG, b"good")]


@pytest.mark.parametrize(
    ("member", "why"),
    [
        *(
            ((name, REG, b"x"), "not a plain path")
            for name in ("../evil", "out/../../evil", "/tmp/evil", "out//evil", "out/./evil")
        ),
        (("evil", REG, b"x"), "none of the announced outputs"),
        (("outer", REG, b"x"), "none of the announced outputs"),
        (("out/absent/evil", REG, b"x"), "before the directory"),
        (("out/good/evil", REG, b"x"), "before the directory"),
        (("out", DIR, b""), "comes twice"),
        (("out", SYM, b"", "x"), "a link that leads out"),
        *(
            (("out/l", SYM, b"", target), "a link that leads out")
            for target in ("/etc", "../x", "good/../../x", "")
        ),
        (("out/l", tarfile.LNKTYPE, b"", "out/good"), "neither a directory"),
        *(
            (("out/l", kind, b""), "neither a directory")
            for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE)
        ),
        (("out/l", tarfile.XHDTYPE, b"x"), "neither a directory"),
        (("out/l", DIR, b"x"), "has content"),
        (("out/l", REG, bytes(997)), "more than was announced"),
        (("out/l", tarfile.GNUTYPE_LONGNAME, bytes(70_000)), "a name is too long"),
    ],
)
def test_a_hostile_member_ends_it(home: Path, member: tuple, why: str) -> None:
    (home.parent / "evil").unlink(missing_ok=True)
    got = take(forged([*GOOD, member, ("out/later", REG, b"later")]), home, "out")
    assert not got.complete
    assert why in got.problems[0].why
    assert "the stream is damaged" in got.problems[0].why
    # What came before is as good as it was.
    assert names(home) == ["out.partial"]
    assert names(home / "out.partial") == ["good"]
    assert not (home.parent / "evil").exists()


def test_nothing_is_written_through_a_link(home: Path) -> None:
    (home.parent / "victim").mkdir()
    members = [*GOOD, ("out/d", DIR, b""), ("out/d/l", SYM, b"", ".."), ("out/d/l/x", REG, b"x")]
    assert "before the directory" in take(forged(members), home, "out").problems[0].why
    members = [*GOOD, ("out/l", SYM, b"", "good"), ("out/l", REG, b"x")]
    got = take(forged(members), home, "out")
    assert got.left_out == {"out/l": "File exists"}
    assert (home / got.placed[0] / "good").read_text() == "good"


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"results": 1}, "version 1, this program reads 3"),
        *(({"roots": [root]}, "not a plain path") for root in ("../x", "/etc", "")),
        *(({"roots": [root]}, f"nobody asked for '{root}'") for root in (".ssh", "out/x")),
        *(({"roots": roots}, "lie in one another") for roots in (["out", "out"], ["o", "o/u"])),
        ({"files": -1}, "a count is below zero"),
        ({"bytes": 1 << 70}, "bytes: is 1180591620717411303424, not a whole number"),
        ({"more": 1}, "more: unknown"),
        ({"x" * 10_000: 1}, "xxx"),
        (b"", "it ended before"),
        (b"srun: error: hpc07: task 0: Killed\n", "begins with b'srun: error"),
        *((line, "begins with") for line in (b"[]\n", b"\xff\n", b"[" * 100_000 + b"\n")),
        (b"x" * (17 << 20), "a line has more than"),
    ],
)
def test_a_hostile_first_line_is_refused(home: Path, header: dict | bytes, why: str) -> None:
    data = header if isinstance(header, bytes) else forged(GOOD, **header)
    with pytest.raises(NodeError) as caught:
        take(data, home, "out", "o", "o/*")
    assert caught.value.problem.what == "no results arrived"
    assert why in caught.value.problem.why
    assert len(str(caught.value)) < 600
    assert names(home) == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.replace(b"good", b"gone", 2), "digest"),
        (lambda data: data.replace(b'"end"', b'"and"'), "instead of its end mark"),
        (lambda data: data.replace(b'"gaps": 0', b'"gaps": -1'), "gaps is -1"),
        (lambda data: data.replace(b', "gaps": 0', b""), "gaps: missing"),
        (lambda data: data.replace(bytes(1024) + b"{", bytes(1023) + b"x{"), "end mark of the tar"),
        (lambda data: data.replace(b"ustar", b"uztar", 1), "cannot be read"),
    ],
)
def test_a_damaged_stream_is_kept_as_partial(
    home: Path, change: Callable[[bytes], bytes], why: str
) -> None:
    got = take(change(forged(GOOD)), home, "out")
    assert not got.complete
    assert why in got.problems[0].why
    assert set(names(home)) <= {"out.partial"}


def test_strange_modes_and_times(home: Path) -> None:
    assert take(forged(GOOD), home, "out").complete  # the forger can be honest
    assert stat.S_IMODE((home / "out" / "good").stat().st_mode) == 0o644
    (home / "out" / "good").write_text("mine")
    strange = [("out", DIR, b"", 0o7777, 1 << 62), GOOD[1]]
    assert take(forged(strange), home, "out").placed == ("out.1",)
    assert stat.S_IMODE((home / "out.1").stat().st_mode) == 0o777


# --- no room -------------------------------------------------------------------------------------

RECEIVE = """
from bundle.results import receive
import os
check = receive._require_room
def fill(*args):
    check(*args)
    if {others}:
        open({home!r} + '/others', 'wb').write(bytes({others}))
receive._require_room = fill
try:
    with open({stream!r}, "rb") as stream:
        got = receive.receive_outputs(stream, {home!r}, ["out"], "hpc07")
    said = [got.complete, got.placed, got.files, [str(problem) for problem in got.problems]]
except receive.NodeError as exc:
    said = str(exc)
print(json.dumps([said, sorted(os.listdir({home!r}))]))
"""


def in_small(home: Path, mount: str, data: bytes, others: int = 0) -> list:
    """Receive on a small file system, where others write so much after the room was seen."""
    stream = home.parent / "stream"
    stream.write_bytes(data)
    code = RECEIVE.format(stream=str(stream), home=str(home), others=others)
    return namespace("-m", f"mount -t tmpfs -o {mount} none {home}", code)


def test_too_little_room_is_said_before_anything_is_written(work: Path, home: Path) -> None:
    data = stream_of(work, "out")
    (home.parent / "file").touch()
    for name, why in (("gone", "does not exist"), ("file", "is not a directory")):
        with pytest.raises(NodeError, match=f"no place for results; it {why}"):
            take(data, home.parent / name, "out")
    said, left = in_small(home, "size=1m", data)
    assert said.startswith(f"{home}: the results do not fit; needs 6.3 MB, 1.0 MB are free")
    assert "still at hpc07" in said
    assert left == []
    said, left = in_small(home, "nr_inodes=9", data)
    assert "needs 27 inodes, 8 are free" in said
    assert left == []
    said, left = in_small(home, "ro", data)
    assert "mounted read-only" in said
    # Nothing has to be run from there.
    said, left = in_small(home, "noexec", data)
    assert said == [True, ["out"], 7, []]


def test_a_disk_that_fills_up_keeps_what_arrived(home: Path) -> None:
    members = [("out", DIR, b""), ("out/a", REG, b"a" * 9000), ("out/b", REG, b"b" * 990_000)]
    members.append(("out/c", REG, b"c" * 200_000))
    data = forged(members, bytes=1_200_000, entries=4)
    said, left = in_small(home, "size=1500k", data, others=800_000)
    complete, placed, files, (problem,) = said
    assert (complete, placed, files) == (False, ["out.partial"], 1)
    assert f"{home}: the results are not complete; No space left on device" in problem
    assert left == ["others", "out.partial"]


def test_an_output_that_cannot_be_put_in_place_is_not_lost(tmp_path: Path, home: Path) -> None:
    needs("root")
    (tmp_path / "work" / "runs" / ("n" * 250)).mkdir(parents=True)
    (tmp_path / "work" / "runs" / ("n" * 250) / "x").write_text("x")
    data = stream_of(tmp_path / "work", "runs/*")[:-1]  # too long with ".partial" behind it
    got = take(data, home, "runs/*")
    assert not got.complete
    assert got.placed == ()
    assert [p.what for p in got.problems] == [
        "the results are not complete",
        "an output could not be put in place",
    ]
    assert got.problems[1].fix == f"it is in {home}/results.partial/0"
    assert (home / "results.partial" / "0" / "x").read_text() == "x"
    shutil.rmtree(home / "results.partial")
