"""Files that appear whole, and what a person is told where they cannot."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest

from stager.core.errors import StagerError
from stager.core.files import replace_file, write_output


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    place = tmp_path / "folder" / "a"
    place.parent.mkdir()
    place.write_bytes(b"old")
    with contextlib.suppress(ValueError), replace_file(place) as file:
        file.write(b"ne")
        raise ValueError
    assert [path.read_bytes() for path in place.parent.iterdir()] == [b"old"]


def test_the_message_names_the_file_that_was_asked_for(tmp_path):
    """Not the temporary one beside it, which is what could not be opened or renamed."""
    missing = tmp_path / "no" / "a"
    with pytest.raises(StagerError) as caught, write_output(missing):
        pass
    assert caught.value.message == f"{missing} cannot be written: No such file or directory"
    assert "--output" in caught.value.hint
    with pytest.raises(StagerError) as caught, write_output(tmp_path, hint="take a file") as file:
        file.write(b"new")
    assert caught.value.message == f"{tmp_path} cannot be written: Is a directory"
    assert caught.value.hint == "take a file"


def test_a_file_and_a_link_are_replaced_once_all_is_written(tmp_path):
    target, link, gone = tmp_path / "target", tmp_path / "link", tmp_path / "gone"
    target.write_text("old")
    link.symlink_to(target)
    gone.symlink_to(tmp_path / "nothing")
    for place in (link, gone, tmp_path / "new"):
        before = place.read_text() if place.exists() else None
        with replace_file(place) as handle:
            handle.write(b"new")
            handle.flush()
            assert (place.read_text() if place.exists() else None) == before
        assert place.read_text() == "new"
        assert not place.is_symlink()
    assert target.read_text() == "old"


def test_what_is_no_file_stays(tmp_path):
    """As root, `-o /dev/null` would take the machine's /dev/null away."""
    folder = tmp_path / "kinds"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    (folder / "device").symlink_to("/dev/null")  # by a link, so that nothing is harmed
    (folder / "output").symlink_to("/proc/self/fd/1")
    for place in sorted(folder.iterdir()):
        before = place.lstat()
        with (
            pytest.raises(OSError, match="is not a regular file") as failed,
            replace_file(place) as handle,
        ):
            handle.write(b"new")
        assert failed.value.filename == str(place)
        assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert not list(folder.glob(".*"))
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
