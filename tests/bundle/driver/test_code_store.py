"""Compiled code in the offline root: what is kept, what is used, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bundle.driver.code_store import (
    StoredCode,
    add_code,
    check_files,
    compute_software_digest,
    list_stored_code,
    read_files,
    write_files,
    write_shipment,
)
from bundle.launch.compiled_code import (
    measure_code,
    receive_code,
    remove_incomplete_code,
    select_code,
)
from bundle.protocol.digest import Digest
from bundle.protocol.problem import NodeError
from bundle.results.selection import select_outputs
from bundle.results.stream import VERSION, StreamEnd, StreamHead, send_selection
from tests.support.demo_project import manifest
from tests.support.object_files import ELF

KIND = "0123456789abcdef" * 4
CODE = StoredCode(KIND, "x86_64", Digest.of(b"torch"), "7", "b" * 64, "c" * 64, first_step=30.3)
MADE = {
    "inductor/ab/kernel.so": ELF + bytes(1136),
    "inductor/fxgraph/ab/key/graph": b"graph",
    "triton/KEY/kernel.cubin": b"cubin",
}


def compiled(folder: Path, **more: bytes) -> str:
    for name, content in {**MADE, **more}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (0, 0))  # as everything has that was received
    return str(folder)


def unpack(file: str | Path, target: Path) -> None:
    with open(file, "rb") as stream:
        receive_code(stream, f"{target}.new", str(target), "n1")


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_one_job_has_compiled_is_there_for_the_next(tmp_path: Path) -> None:
    store, here, there = (tmp_path / name for name in ("store", "here", "there"))
    kept = add_code(str(store), compiled(here), CODE, 1 << 20)
    assert (kept.files, kept.bytes, kept.kernels) == (3, 1210, 2)
    assert list_stored_code(str(store)) == [kept]
    assert store.stat().st_mode & 0o777 == 0o700
    shipment = tmp_path / "shipment"
    assert write_shipment([kept], str(shipment)) == []
    (there / "inductor" / "ab").mkdir(parents=True)
    (there / "inductor" / "ab" / "kernel.so").write_bytes(b"my own")
    unpack(shipment, there)
    assert contents(there) == {**MADE, "inductor/ab/kernel.so": b"my own"}
    assert all(os.path.isdir(there / path) for path in kept.paths)
    # What was sent has no time of its own, so that only what ranks compile is new.
    (there / "inductor" / "new.so").write_bytes(b"new")
    amount = measure_code(str(there), 1000.0)
    assert (amount.new, amount.total) == (2, 4)
    assert (amount.new_bytes, amount.total_bytes) == (9, 19)


def test_only_what_is_new_and_finished_is_selected(tmp_path: Path) -> None:
    compiled(tmp_path)
    for name in ("new.py", ".17.tmp", "x.lock"):
        (tmp_path / "inductor" / name).write_bytes(b"new")
    os.mkfifo(tmp_path / "inductor" / "pipe")
    (tmp_path / "inductor" / "link").symlink_to("/etc/passwd")
    (tmp_path / ".headers").mkdir()
    (tmp_path / ".headers" / "x.h.gch").write_bytes(b"header")
    (tmp_path / "triton" / "KEY" / "tmp.pid_7_x").mkdir()
    (tmp_path / "triton" / "KEY" / "tmp.pid_7_x" / "kernel.json").write_bytes(b"new")
    (tmp_path / "CUDA_CACHE_PATH").mkdir()
    (tmp_path / "CUDA_CACHE_PATH" / "kernel").write_bytes(b"of a library")
    names = [entry.name for entry in select_code(str(tmp_path), 1000.0).entries]
    own = ["CUDA_CACHE_PATH", "CUDA_CACHE_PATH/kernel"]
    assert names == [*own, "inductor", "inductor/new.py"]
    assert select_code(str(tmp_path), 1000.0, unchanged_seconds=60.0).entries == ()
    assert measure_code(str(tmp_path), 1000.0).new == 7
    remove_incomplete_code(str(tmp_path), 1000.0)
    assert list((tmp_path / ".headers").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"", ELF[:40], bytes(64), ELF[:58] + b"\1\0\1\0\0\0"],
    ids=["empty", "part of the header", "no header", "no table"],
)
def test_an_object_file_whose_end_is_missing_is_not_kept(tmp_path: Path, content: bytes) -> None:
    compiled(tmp_path, **{"whole.so": ELF, "cut.so": content})
    names = [entry.name for entry in select_code(str(tmp_path)).entries]
    assert "whole.so" in names
    assert "cut.so" not in names
    remove_incomplete_code(str(tmp_path), 1.0)
    assert (tmp_path / "cut.so").exists()  # an earlier job's
    remove_incomplete_code(str(tmp_path), 0.0)
    assert contents(tmp_path) == {**MADE, "whole.so": ELF}


def test_the_least_recently_used_goes_beyond_the_limit(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    for number in range(4):
        folder = tmp_path / str(number)
        compiled(folder, **{"inductor/x": b"%d" % number * 100})
        kept = add_code(store, str(folder), replace(CODE, job_id=str(number)), 3000)
        os.utime(kept.path, (number, number))
    assert [code.job_id for code in list_stored_code(store)] == ["2", "3"]
    assert len(os.listdir(Path(store, KIND))) == 4  # each with its description


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o666),
        lambda path: path.parent.chmod(0o777),
        lambda path: path.parents[1].chmod(0o770),
        lambda path: path.with_suffix(".json").chmod(0o622),
        lambda path: path.with_suffix(".json").write_text("{"),
        lambda path: path.with_suffix(".json").write_text("[" * 100_000),
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: (path.rename(path.parents[2] / "x"), path.symlink_to(path.parents[2] / "x")),
        lambda path: path.rename(path.with_name("another.code")),
        lambda path: path.parent.rename(path.parents[1] / "another-kind"),
        pytest.param(
            lambda path: os.chown(path, 4711, 4711),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_what_somebody_else_may_have_written_is_not_used(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    store = str(tmp_path / "store")
    spoil(Path(add_code(store, compiled(tmp_path / "code"), CODE, 1 << 20).path))
    assert list_stored_code(store) == []


@pytest.mark.parametrize("cut", [-1, 500])
def test_a_damaged_file_is_removed(tmp_path: Path, cut: int) -> None:
    store = str(tmp_path / "store")
    kept = add_code(store, compiled(tmp_path / "code"), CODE, 1 << 20)
    path = Path(kept.path)
    data = path.read_bytes()
    path.write_bytes(data[:cut] + (b"x" if cut == -1 else b""))
    other = add_code(store, compiled(tmp_path / "x", **{"inductor/x": b"x"}), CODE, 1 << 20)
    [why] = write_shipment([kept, other], str(tmp_path / "shipment"))
    assert "was damaged, and has been removed" in why
    with pytest.raises(ValueError, match="No such file"):
        write_shipment([replace(other, path=kept.path)], str(tmp_path / "shipment2"))
    assert list_stored_code(store) == [other]
    assert not path.exists()


@pytest.mark.parametrize("place", ["", KIND])
def test_nothing_is_written_where_others_may_write(tmp_path: Path, place: str) -> None:
    store = tmp_path / "store"
    (store / KIND).mkdir(parents=True)
    store.chmod(0o700)
    (store / place).chmod(0o770)
    with pytest.raises(PermissionError, match="others may write to it"):
        add_code(str(store), compiled(tmp_path / "code"), CODE, 1 << 20)
    assert [path for path in store.rglob("*") if path.is_file()] == []


def test_more_than_the_limit_takes_nothing_elses_place(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    kept = add_code(store, compiled(tmp_path / "code"), CODE, 1500)
    with pytest.raises(ValueError, match=r"more than launch\.compile-cache-limit"):
        add_code(store, compiled(tmp_path / "big", **{"inductor/x": bytes(2000)}), CODE, 1500)
    assert list_stored_code(store) == [kept]


def test_what_a_driver_has_left_that_was_killed_is_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    add_code(str(store), compiled(tmp_path / "code"), CODE, 1 << 20)
    for name in (".new-old", ".new-recent"):
        (store / name).mkdir()
    os.utime(store / ".new-old", (0, 0))
    add_code(str(store), compiled(tmp_path / "code"), CODE, 1 << 20)
    assert sorted(os.listdir(store)) == [".new-recent", KIND]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o6777
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("../../escaped"),
        member("/tmp/escaped"),
        member("inductor/../../escaped"),
        member("elsewhere/x"),
        member("inductor/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("inductor/link", tarfile.SYMTYPE, "../../../x"),
        member("inductor/hard", tarfile.LNKTYPE, "inductor"),
        member("inductor/device", tarfile.CHRTYPE),
        member("inductor/pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: f"{info.name} {info.type!r}",
)
def test_hostile_code_is_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    """Its digest is right: a node made it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(member("inductor", tarfile.DIRTYPE))
        tar.addfile(bad)
    content = data.getvalue()[: 2 * 512] + bytes(2 * 512)
    head = StreamHead(VERSION, ("inductor",), 9, 9, 9999, (), {})
    end = StreamEnd(1, hashlib.sha256(content).hexdigest(), {}, 0)
    lines = [json.dumps(asdict(line)).encode() + b"\n" for line in (head, end)]
    file = tmp_path / "code"
    file.write_bytes(lines[0] + content + lines[1])
    target = tmp_path / "target"
    with pytest.raises(NodeError):
        unpack(file, target)
    assert contents(target) == {}
    assert not (tmp_path / "escaped").exists()


def test_nothing_is_written_through_the_link_to_torch(tmp_path: Path) -> None:
    evil, target, torch = (tmp_path / name for name in ("evil", "target", "environment"))
    for folder in (evil / ".torch", target, torch):
        folder.mkdir(parents=True)
    (evil / ".torch" / "__init__.py").write_bytes(b"evil")
    (target / ".torch").symlink_to(torch)
    file = tmp_path / "code"
    with file.open("wb") as stream:
        send_selection(select_outputs(str(evil), (".torch",)), str(evil), stream)
    with pytest.raises(NodeError):
        unpack(file, target)
    assert list(torch.iterdir()) == []


def test_no_file_is_set_uid_or_for_others(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    compiled(folder)
    (folder / "inductor" / "ab" / "kernel.so").chmod(0o6777)
    kept = add_code(str(tmp_path / "store"), str(folder), CODE, 1 << 20)
    target = tmp_path / "target"
    unpack(kept.path, target)
    assert contents(target) == MADE
    modes = {path.stat().st_mode & 0o7777 for path in target.rglob("*") if path.is_file()}
    assert modes == {0o700}


def test_code_depends_on_torch_and_triton() -> None:
    made = compute_software_digest(manifest("torch", "numpy"))
    assert made is not None
    assert made == compute_software_digest(manifest("torch", "pandas"))
    assert made != compute_software_digest(replace(manifest("torch"), name="another project"))
    assert made != compute_software_digest(manifest("torch", "triton"))
    assert compute_software_digest(manifest("numpy")) is None


def test_code_that_is_carried_is_checked(tmp_path: Path) -> None:
    kept = add_code(str(tmp_path / "store"), compiled(tmp_path / "code"), CODE, 1 << 20)
    files = read_files(kept)
    check_files(files)
    before = os.umask(0o002)
    try:
        write_files(str(tmp_path / "there"), files)
    finally:
        os.umask(before)
    [there] = list_stored_code(str(tmp_path / "there"))
    assert replace(there, path=kept.path) == kept
    code, description = files
    for wrong in (
        {f"../{code}": files[code], description: files[description]},
        {f"{KIND}/{'0' * 64}.json": files[description]},
        {f"{'0' * 64}.py": b"x"},
        {code: files[code][:-1], description: files[description]},
        {code: files[code]},
        {code: files[code], description: b"[]"},
        {code: files[code], description: files[description].replace(KIND.encode(), b"../x")},
        {"": b""},
    ):
        with pytest.raises(ValueError, match=r"name|describes"):
            check_files(wrong)
