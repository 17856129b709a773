"""Files of a job: made for their user or a group whatever the umask, and never through a link."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundle.protocol.enumerations import LogMode
from bundle.system import permissions


def touch(path: Path, flags: str, mode: LogMode = LogMode.PRIVATE) -> None:
    open(path, flags, opener=permissions.make_opener(mode)).close()


@pytest.fixture(params=[0, 0o022, 0o077, 0o277])
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    old = os.umask(request.param)
    yield
    os.umask(old)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("mode", "folder", "file"), [("private", 0o700, 0o600), ("group", 0o750, 0o640)]
)
def test_the_umask_does_not_decide(
    tmp_path: Path, any_umask: None, mode: str, folder: int, file: int
) -> None:
    place = tmp_path / "a" / "b"
    permissions.make_folder(str(place), mode)
    assert [mode_of(place), mode_of(place.parent)] == [folder, folder]
    for flags in ("xb", "ab", "wb"):
        with open(place / flags, flags, opener=permissions.make_opener(mode)) as out:
            out.write(b"x")
        assert mode_of(place / flags) == file


def test_what_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o751)
    path = tmp_path / "log"
    path.write_text("a")
    path.chmod(0o664)
    permissions.make_folder(str(tmp_path), LogMode.PRIVATE)
    with open(path, "ab", opener=permissions.make_opener(LogMode.PRIVATE)) as out:
        out.write(b"b")
    assert (mode_of(tmp_path), mode_of(path), path.read_text()) == (0o751, 0o664, "ab")
    with pytest.raises(FileExistsError):
        touch(path, "xb")


@pytest.mark.needs("root")
def test_the_group_is_that_of_the_directory(tmp_path: Path) -> None:
    os.chown(tmp_path, -1, 12345)
    permissions.make_folder(str(tmp_path / "new"), LogMode.GROUP)
    touch(tmp_path / "new" / "log", "ab", LogMode.GROUP)
    assert (tmp_path / "new" / "log").stat().st_gid == 12345
    touch(tmp_path / "own", "ab")
    assert (tmp_path / "own").stat().st_gid == os.getegid()


@pytest.mark.needs("root")
def test_a_group_that_is_not_the_users_reads_nothing() -> None:
    """Else everybody in the user's own group would, which often is everybody."""
    with tempfile.TemporaryDirectory() as name:  # not below pytest's own, which others cannot enter
        os.chown(name, 54321, 12345)
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(54321)
                os.setuid(54321)
                touch(Path(name, "log"), "ab", LogMode.GROUP)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert mode_of(Path(name, "log")) == 0o600


def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        permissions.make_folder(str(tmp_path / "target" / "logs"), LogMode.PRIVATE)
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(OSError, match=r"symbolic links|No such device"):
            touch(tmp_path / name, "wb")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="not a regular file"):
        touch(tmp_path / "pipe", "wb")
    os.close(reader)
    assert (tmp_path / "target").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.needs("root")
@pytest.mark.parametrize("flags", ["wb", "ab"])
def test_a_file_that_is_planted_is_left_as_it_is(tmp_path: Path, flags: str) -> None:
    """By a hard link, or by somebody else whose own directory it is not."""
    log = tmp_path / "log"
    (tmp_path / "mine").write_text("mine")
    os.link(tmp_path / "mine", log)
    with pytest.raises(OSError, match="a hard link"):
        touch(log, flags)
    (tmp_path / "mine").unlink()
    os.chown(log, 54321, -1)
    with pytest.raises(OSError, match=r"belongs to somebody else \(uid 54321\)"):
        touch(log, flags)
    assert log.read_text() == "mine"
    os.chown(tmp_path, 54321, -1)
    touch(log, flags)
    assert log.read_text() == ("" if flags == "wb" else "mine")
