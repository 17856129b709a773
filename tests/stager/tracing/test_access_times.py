"""Access times: what counts as read, and places where that cannot be seen."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import stat
from pathlib import Path

import pytest

from stager.core.errors import StagerError
from stager.core.store import Store
from stager.tracing import is_read, keeps_access_times, set_back, traced_place
from tests.support.building import left_in_tmp
from tests.support.namespaces import namespace
from tests.support.needs import lacks

ROOM = (1000, 10)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with files that are read in different ways, their access times set back."""
    if not keeps_access_times(tmp_path):
        lacks("access times", f"{tmp_path} keeps none")
    folder = tmp_path / "tree"
    (folder / "deep" / "er").mkdir(parents=True)
    for name in ("opened", "mapped", "listed", "deep/er/read", "run.sh"):
        (folder / name).write_bytes(b"#!/bin/sh\n" * 1000)
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("mapped")
    os.utime(folder / "opened", ns=(1, 1))
    set_back(folder)
    return folder


def read(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if stat.S_ISREG(path.lstat().st_mode))
    return {str(path.relative_to(folder)) for path in files if is_read(str(path))}


def test_reading_mapping_and_running_count_and_looking_does_not(tree: Path) -> None:
    assert read(tree) == set()
    assert (tree / "opened").stat().st_mtime_ns == 1, "other times stay"
    for path in tree.rglob("*"):
        path.stat()
    with (tree / "opened").open("rb"):
        pass
    assert read(tree) == set()
    with (tree / "mapped").open("rb") as file:
        # Not a byte of it is looked at: so a library counts that the loader maps.
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    assert read(tree) == {"mapped"}
    (tree / "deep" / "er" / "read").read_bytes()
    os.spawnv(os.P_WAIT, str(tree / "run.sh"), ["run.sh"])
    assert read(tree) == {"mapped", "deep/er/read", "run.sh"}
    (tree / "listed").unlink()
    assert is_read(str(tree / "listed")), "what a program removes is no proposal"


def test_a_shared_library_that_is_loaded_counts_as_read(tmp_path: Path, native_wheel: Path) -> None:
    shutil.unpack_archive(native_wheel, tmp_path, "zip")
    (library,) = tmp_path.rglob("*.so")
    if not keeps_access_times(tmp_path):
        lacks("access times", f"{tmp_path} keeps none")
    set_back(tmp_path)
    ctypes.CDLL(str(library))
    assert is_read(str(library))


def test_a_place_is_in_the_store_and_gone_afterwards(tmp_path: Path) -> None:
    store = Store(tmp_path / "offline")
    with traced_place(store, ROOM) as folder:
        assert folder.parent == store.root / "tmp"
        assert list(folder.iterdir()) == []
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with store.lock():  # a build in the meantime
            assert folder.is_dir()
    assert left_in_tmp(store) == []


def test_no_room_is_a_reason(tmp_path: Path) -> None:
    store = Store(tmp_path / "offline")
    with pytest.raises(StagerError) as refused, traced_place(store, (1 << 60, 10)):
        pass
    assert f"{store.root}: " in refused.value.context[0]
    assert all("room" in line or "free" in line for line in refused.value.context)
    assert "$TMPDIR" in refused.value.hint
    assert left_in_tmp(store) == []


CODE = """
import os
from pathlib import Path
from stager.core.errors import StagerError
from stager.core.store import Store
from stager.tracing import traced_place
os.environ["TMPDIR"] = {tmpdir!r}
try:
    with traced_place(Store(Path({root!r})), (1000, 10)) as folder:
        print(json.dumps([str(folder)]))
except StagerError as exc:
    print(json.dumps([exc.message, exc.hint, *exc.context]))
"""


def test_without_access_times_there_is_another_place_or_a_refusal(tmp_path: Path) -> None:
    """A store, and all temporary directories, mounted with noatime; then one that is not."""
    root, other = tmp_path / "offline", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
    mount = "mount -t tmpfs -o noatime,size=1M none"
    of_tmp = 'mount -o remount,bind,noatime "$(findmnt -nro TARGET -T /tmp)"'
    shell = f"{of_tmp}; {mount} {root}; {mount} /dev/shm; {mount} {other}"
    refused = namespace("-m", shell, CODE.format(tmpdir=str(other), root=str(root)))
    assert isinstance(refused, list)
    message, hint, *context = refused
    assert "which files a program reads" in message
    assert "noatime" in hint
    assert {f"{root}: it is mounted with noatime", f"{other}: it is mounted with noatime"} <= set(
        context
    )
    shell += f"; mount -t tmpfs -o strictatime,size=1M none {other}"
    (found,) = namespace("-m", shell, CODE.format(tmpdir=str(other), root=str(root)))  # type: ignore[misc]
    assert Path(found).parent == other
