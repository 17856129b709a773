"""Compiling the modules of a large wheel beside its unpacking: the same bytes, and nothing left."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from stager.core.errors import StagerError, WheelError
from stager.core.store import Store
from stager.core.values import Target
from stager.layers import bytecode
from stager.layers.bytecode import LARGE, bytecode_path, compile_module, compiling
from stager.layers.layer_build import make_layers
from stager.layers.source import LayerSource
from tests.support.building import HOST, contents, left_in_tmp, source_of, wheel_of
from tests.support.processes import is_alive, until
from tests.support.wheelhouse import make_wheel

COMMENT = "#" * 78 + "\n"
MODULES = 12


def text(number):
    """A module whose length is mostly comment, which costs little to compile."""
    return f"VALUE = {number}\ndef f{number}(x): return x + VALUE\n" + COMMENT * (
        LARGE // MODULES // len(COMMENT) + 1
    )


FILES = {
    "large/__init__.py": "",
    **{f"large/m{number}.py": text(number) for number in range(MODULES)},
    "large/template.py": "{{ not python }} =\n",
    "large/tests/test_it.py": "def test_it(): pass\n",
    "large/data.txt": "no module",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A wheel of as much source as it takes."""
    return make_wheel(tmp_path_factory.mktemp("large"), "large", files=FILES)


def no_children():
    """Whether no process of multiprocessing is left."""
    return not multiprocessing.active_children()


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_a_layer_has_the_bytecode_of_every_module(large, tmp_path, jobs):
    store = Store(tmp_path / "store")
    with store.lock():
        made = make_layers([source_of(large)], store=store, target=HOST, jobs=jobs)
    found = contents(store.layer(made.layers[0].id))
    site = f"lib/python{HOST.python}/site-packages"
    modules = [name for name in FILES if name.endswith(".py")][:-2]
    for name in modules:
        source = FILES[name].encode()
        assert found[f"{site}/{name}"] == source
        assert found[f"{site}/{bytecode_path(name, HOST)}"] == compile_module(source, name)
    assert sum(name.endswith(".pyc") for name in found) == len(modules)
    record = found[f"{site}/large-1.0.dist-info/RECORD"].decode()
    assert record.count(".pyc,,") == len(modules)
    assert left_in_tmp(store) == []


@pytest.fixture
def slow(monkeypatch):
    """Processes forked from this one do not end by themselves."""
    monkeypatch.setattr(bytecode, "compile_module", lambda source, path: time.sleep(600))


def test_where_one_layer_is_made_at_a_time_nothing_runs_beside_it(large, tmp_path):
    with compiling(large, HOST, 1) as ahead:
        assert no_children()
        assert ahead is not None
        source = FILES["large/m3.py"].encode()
        digest = importlib.util.source_hash(source)
        assert ahead.take("large/m3.py", digest) == compile_module(source, "large/m3.py")


def test_what_is_no_module_or_is_not_worth_it_is_not_among_them(large, tmp_path):
    with compiling(large, HOST, 2) as ahead:
        assert ahead is not None
        assert [name for name in FILES if name not in ahead] == [
            "large/tests/test_it.py",
            "large/data.txt",
        ]
        digest = importlib.util.source_hash(FILES["large/template.py"].encode())
        assert ahead.take("large/template.py", digest) is None


def test_a_small_wheel_is_compiled_as_it_is_read(tmp_path):
    small = make_wheel(tmp_path, "small", files={"small.py": COMMENT * (LARGE // len(COMMENT) - 1)})
    with compiling(small, HOST, 8) as ahead:
        assert ahead is None
        assert no_children()


def test_for_another_python_nothing_is_compiled(large, tmp_path):
    other = Target(python="3.9" if HOST.python != "3.9" else "3.10", platform=HOST.platform)
    with compiling(large, other, 8) as ahead:
        assert ahead is None


def test_scripts_and_data_are_not_taken_for_modules_of_the_same_name(tmp_path):
    more = {f"large-1.0.data/purelib/{name}": text for name, text in FILES.items()}
    wheel = make_wheel(tmp_path, "large", files={"large.py": "", **more})
    with compiling(wheel, HOST, 2) as ahead:
        assert ahead is None


def test_a_wheel_that_changes_meanwhile_is_told(large, tmp_path):
    with compiling(large, HOST, 2) as ahead:
        assert ahead is not None
        with pytest.raises(
            StagerError, match=r"large-1\.0.*large/m1\.py changed while it was being read"
        ):
            ahead.take("large/m1.py", importlib.util.source_hash(b"another"))


@pytest.mark.usefixtures("slow")
def test_a_process_that_was_killed_is_told(large, tmp_path):
    with compiling(large, HOST, 2) as ahead:
        (child,) = multiprocessing.active_children()
        child.kill()
        assert ahead is not None
        with pytest.raises(StagerError, match=r"large-1\.0.* modules was killed") as caught:
            ahead.take("large/m1.py", b"")
    assert "--jobs 1" in (caught.value.hint or "")
    assert no_children()


@pytest.mark.parametrize("place", [0.02, 0.9])
def test_a_damaged_wheel_is_refused_as_ever(large, tmp_path, place):
    data = bytearray(large.read_bytes())
    at = int(len(data) * place)
    data[at : at + 40] = os.urandom(40)
    damaged = tmp_path / large.name
    damaged.write_bytes(data)
    store = Store(tmp_path / "store")
    with store.lock(), pytest.raises(WheelError, match=r"large-1\.0"):
        make_layers([source_of(damaged)], store=store, target=HOST, jobs=4)
    assert left_in_tmp(store) == []
    assert list(store.layers.iterdir()) == []


def test_a_name_that_is_no_text_is_refused_as_ever(large, tmp_path):
    data = large.read_bytes().replace(b"large/template.py", b"large/t\xff\xfeplate.py")
    assert data.count(b"\xff\xfeplate.py") >= 2  # in the header and in the directory
    flags = data.rfind(b"PK\x01\x02", 0, data.rfind(b"\xff\xfeplate.py")) + 8
    damaged = tmp_path / large.name
    damaged.write_bytes(data[:flags] + b"\x00\x08" + data[flags + 2 :])  # names are UTF-8
    store = Store(tmp_path / "store")
    with store.lock(), pytest.raises(WheelError, match=r"large-1\.0"):
        make_layers([source_of(damaged)], store=store, target=HOST, jobs=4)
    assert left_in_tmp(store) == []


@pytest.mark.parametrize("jobs", [1, 8])
def test_a_damaged_module_that_is_left_out_does_not_matter(tmp_path, jobs):
    helper = "large/tests/helper.py"
    tests = {"large/tests/__init__.py": "", helper: "# the last words of a helper\n" * 40_000}
    wheel = make_wheel(tmp_path, "large", files={**FILES, **tests})
    with zipfile.ZipFile(wheel) as archive:
        crc = archive.getinfo(helper).CRC.to_bytes(4, "little")
    data = wheel.read_bytes()
    assert data.count(crc) == 2
    wheel.write_bytes(data.replace(crc, bytes(4)))
    source = LayerSource.of_wheel(wheel_of(wheel), ("tests",))
    store = Store(tmp_path / "store")
    with store.lock():
        made = make_layers([source], store=store, target=HOST, jobs=jobs)
    found = contents(store.layer(made.layers[0].id))
    assert not any("/tests/" in name for name in found)
    modules = [name for name in FILES if name.endswith(".py") and "tests" not in name]
    assert sum(name.endswith(".pyc") for name in found) == len(modules) - 1  # but the template


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), MemoryError(), KeyError("x")])
def test_modules_that_a_process_could_not_read_are_not_taken_for_unreadable_python(
    large, tmp_path, monkeypatch, error
):
    def read(archive, name):
        if name == "large/m7.py":
            raise error
        with archive.open(name) as member:
            return member.read()

    monkeypatch.setattr(zipfile.ZipFile, "read", read)
    with compiling(large, HOST, 2) as ahead:
        assert ahead is not None
        with pytest.raises(StagerError, match=r"large/m7\.py could not be compiled") as caught:
            ahead.take("large/m7.py", b"")
    assert type(error).__name__ in caught.value.context[0]


def test_one_that_is_gone_is_left_to_whoever_unpacks_it(tmp_path):
    with compiling(tmp_path / "gone.whl", HOST, 4) as ahead:
        assert ahead is None


@pytest.mark.usefixtures("slow")
def test_an_error_in_the_block_ends_all(large):
    with pytest.raises(KeyError), compiling(large, HOST, 8):
        raise KeyError
    assert no_children()


def test_they_end_with_the_process_that_started_them(large, tmp_path):
    code = f"""
import os, time
from pathlib import Path
from stager.layers import bytecode as ahead
from stager.core.values import Target
def compile_module(source, path):  # asked for once the process will end with its parent
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
ahead.compile_module = compile_module
with ahead.compiling(Path({str(large)!r}), Target.of_host(), 4):
    time.sleep(600)
"""
    argv = [sys.executable, "-c", code]
    cwd = Path(__file__).resolve().parents[3]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=cwd) as parent:
        assert parent.stdout is not None
        children = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    assert until(lambda: not any(map(is_alive, children)), pause=0.02), children
