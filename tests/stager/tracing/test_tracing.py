"""Access times: what counts as read, and places where that cannot be seen."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import pytest

from stager.core.errors import StagerError
from stager.core.store import Store
from stager.layers.prune import check, list_matching
from stager.tracing import (
    LEAST,
    PROGRAMS,
    REASON,
    SMALL,
    UnreadFiles,
    group_files,
    is_read,
    keeps_access_times,
    list_unread,
    make_traced_place,
    needs_gpu,
    set_back,
)
from tests.support.building import left_in_tmp
from tests.support.needs import lacks


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


def test_a_place_is_in_the_store_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "offline")
    with make_traced_place(store) as folder:
        assert folder.parent == store.root / "tmp"
        assert list(folder.iterdir()) == []
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with store.lock():  # a build in the meantime
            assert folder.is_dir()
    assert left_in_tmp(store) == []
    monkeypatch.setattr("stager.tracing.keeps_access_times", lambda folder: False)
    with pytest.raises(StagerError) as refused, make_traced_place(store):
        pass
    assert str(store.root) in refused.value.context
    assert "$TMPDIR" in refused.value.hint
    assert left_in_tmp(store) == []


# --- What was not read of a package, and the patterns for it ------------------------------------


READ = {"p/__init__.py", "p/core.py", "p/lib/libp.so"}
BIG, TINY = LEAST, 10


def parts(files: dict[str, int], read: set[str] = READ, gpus: int = 1) -> list[UnreadFiles]:
    made = group_files((path, size, path in read) for path, size in files.items())
    return sorted(list_unread("p", made, gpus=gpus), key=lambda part: -part.bytes)


def patterns(files: dict[str, int], read: set[str] = READ) -> list[str | None]:
    return [part.pattern for part in parts(files, read)]


PACKAGE = dict.fromkeys(READ, BIG)


@pytest.mark.parametrize(
    ("more", "read", "expected"),
    [
        # The topmost directory of which nothing was read,
        ({"p/test/a.txt": BIG, "p/test/deep/b.txt": BIG, "p/sub/x/c.txt": BIG, "p/sub/r": TINY},
         READ | {"p/sub/r"}, ["p:/p/test/", "p:/p/sub/x/"]),
        # or a file alone that is beside others that were read; never metadata.
        ({"p/lib/libp.a": BIG}, READ, ["p:/p/lib/libp.a"]),
        ({"p/lib/[odd]*.a": BIG, "p-1.0.dist-info/LICENSE": BIG}, READ, [r"p:/p/lib/\[odd]\*.a"]),
    ],
)  # fmt: skip
def test_what_is_named(more: dict[str, int], read: set[str], expected: list[str]) -> None:
    assert patterns(PACKAGE | more, read) == expected
    named = parts(PACKAGE | more, read)[0]
    if named.path == "p/test/":
        assert (named.files, named.bytes) == (2, 2 * BIG)


def test_small_parts_are_told_together() -> None:
    (small,) = parts(PACKAGE | {f"p/{name}/x": TINY for name in "abc"})
    assert small == UnreadFiles("p", "", 3, 3 * TINY, None, SMALL)
    assert patterns({"data/x": BIG}, set()) == ["p:/data/"]
    # A package of which nothing was read keeps its top.
    files = {"p/__init__.py": BIG, "p/a/x.py": BIG, "p/b/y.py": BIG, "p/big.dat": BIG}
    assert patterns(files, set()) == ["p:/p/*/", "p:/p/big.dat"]


def test_a_module_whose_bytecode_was_read_was_read() -> None:
    """With unchecked bytecode Python does not open the source."""
    names = ("__init__", "m", "n")
    files = dict.fromkeys((f"p/{name}.py" for name in names), BIG)
    files |= dict.fromkeys((f"p/__pycache__/{name}.cpython-311.pyc" for name in names), BIG)
    read = {path for path in files if path.endswith(".pyc") and "n.c" not in path}
    assert patterns(files, read) == ["p:/p/n.py"]
    (part,) = parts(files, read)
    assert (part.files, part.bytes) == (2, 2 * BIG)


def test_programs_stay_and_compiled_tests_beside_them_go() -> None:
    """torch does not import where a program of its own is not there, though it does not run it."""
    files = PACKAGE | {"p/bin/manager": BIG, "p/bin/test_api": BIG, "p/bin/test_jit": BIG}
    *tests, programs = parts(files)
    assert [part.pattern for part in tests] == ["p:/p/bin/test_api", "p:/p/bin/test_jit"]
    assert (programs.pattern, programs.reason, programs.bytes) == (None, PROGRAMS, BIG)


def test_without_a_gpu_its_libraries_are_no_evidence() -> None:
    files = PACKAGE | {"p/lib/libtorch_cuda.so": BIG, "p/lib/static.a": BIG, "nvidia/x/y.h": BIG}
    without = {part.pattern: part for part in parts(files, gpus=0)}
    assert set(without) == {"p:/p/lib/static.a", None}
    assert without[None].reason == REASON
    assert without[None].bytes == 2 * BIG
    with_gpu = {part.pattern for part in parts(files, gpus=1)}
    assert with_gpu == {"p:/p/lib/static.a", "p:/p/lib/libtorch_cuda.so", "p:/nvidia/"}


FOR_A_GPU = """
    nvidia-cublas nvidia/cu13/lib/libcublas.so.13
    nvidia-cudnn-cu12 nvidia/cudnn/lib/libcudnn_adv.so.9
    torch torch/lib/libtorch_cuda.so
    torch torch/lib/libcaffe2_nvrtc.so
    torch torch/lib/libtorch_hip.so
    triton triton/backends/nvidia/bin/ptxas
    pytorch-triton-rocm x
    nvidia-nvshmem-cu13 nvidia/nvshmem/lib/libnvshmem_device.a
    bitsandbytes bitsandbytes/libbitsandbytes_cuda126.so
"""
FOR_ANY = """
    triton triton/backends/nvidia/lib/cupti/libcupti_static.a
    torch torch/lib/libtorch_cpu.so
    torch torch/include/ATen/cuda/CUDAContext.h
    torch torch/lib/libkineto.a
    numpy numpy/fft/_pocketfft.so
    cudatext cudatext/x.py
"""


def test_files_for_a_gpu() -> None:
    for listed, needed in ((FOR_A_GPU, True), (FOR_ANY, False)):
        files = [line.split() for line in listed.strip().splitlines()]
        assert [file for file in files if needs_gpu(*file) is not needed] == []


def test_each_proposal_matches_what_it_stands_for_and_is_accepted() -> None:
    read = {"p/__init__.py", "p/core.py", "p/b/read.py"}
    other = ["p/a/x.py", "p/b/[c]/d*.txt", "p/lib one/x ", "q/__init__.py", "q/deep/x.py", "r/x"]
    files = dict.fromkeys([*read, *other, "p/b/test_one", "p/b/test_two"], BIG)
    for part in parts(files, read):
        assert part.pattern is not None
        assert check((part.pattern,), {"p": list(files)}) == []
        left_out = list_matching(part.pattern, files)
        assert len(left_out) == part.files
        assert left_out.isdisjoint(read)
