"""The needs of shared libraries, compared with what the dynamic loader and readelf make of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stager.core import elf
from tests.support.shared_objects import AARCH64, HOST, SharedObject, glibc

MACHINE = HOST.get(os.uname().machine, 0)


def parsed(data):
    return elf.parse(lambda at, size: data[at : at + size])


@pytest.mark.skipif(not MACHINE, reason="the libraries are for other processors")
@pytest.mark.parametrize(
    ("versions", "weak", "needed", "refused"),
    [
        (("2.17",), False, (2, 17), False),
        (("2.17", "2.99"), False, (2, 99), True),
        (("2.99", "2.17"), False, (2, 99), True),
        (("2.99",), True, (0, 0), False),  # the loader goes on without it
    ],
)
def test_what_is_read_is_what_the_loader_asks_for(tmp_path, versions, weak, needed, refused):
    path = tmp_path / "any.so"
    path.write_bytes(glibc(*versions, weak=weak, machine=MACHINE))
    assert elf.read_elf(path).glibc == needed
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    argv = [sys.executable, "-I", "-S", "-c", program, str(path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=False).stderr
    assert ("version `GLIBC_2.99' not found" in said) == refused, said


def test_versions_of_several_libraries_count():
    versions = {"libm.so.6": ["GLIBC_2.29"], "libstdc++.so.6": ["GLIBCXX_3.4.30"]}
    header = parsed(SharedObject(versions=versions, needed=["libz.so.1"]).data())
    assert header.glibc == (2, 29)
    assert header.needed == ("libm.so.6", "libstdc++.so.6", "libz.so.1")
    # ``-z pack-relative-relocs`` asks for no symbol, and yet older loaders cannot apply them.
    versions = {"libc.so.6": ["GLIBC_2.2.5", "GLIBC_ABI_DT_RELR", "GLIBC_PRIVATE"]}
    assert parsed(SharedObject(versions=versions).data()).glibc == (2, 36)


def test_other_processors_are_told_apart():
    assert parsed(glibc("2.17", machine=AARCH64)).machine == "aarch64"


def test_a_library_that_is_cut_or_altered_anywhere_is_read_or_refused_but_stops_nothing():
    whole = glibc("2.17", "2.34")
    for end in range(len(whole)):
        parsed(whole[:end])
    for place in range(6, len(whole)):
        for value in (0x00, 0x7F, 0xFF):
            parsed(whole[:place] + bytes([value]) + whole[place + 1 :])
