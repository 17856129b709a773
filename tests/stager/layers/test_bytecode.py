"""Bytecode made at build time: used as it is on every node, and the same bytes on every machine."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from functools import partial
from importlib.util import source_hash
from pathlib import Path

import pytest

from stager.core.errors import StagerError, WheelError
from stager.core.values import Target
from stager.interpreter import find_compiler
from stager.layers import bytecode
from stager.layers.bytecode import (
    LARGE,
    Compiler,
    bytecode_path,
    compile_in_parallel,
    compile_module,
    is_worth_compiling,
)
from stager.layers.source import layer_id
from tests.support.building import HOST, contents, layers_in, left_in_tmp, source_of
from tests.support.interpreters import OTHERS
from tests.support.processes import is_alive, until
from tests.support.wheelhouse import make_wheel

SOURCE = b"""
'''A module.'''
import os as operating_system

def greet(name: str = "x", count: int = 1_000_000_007) -> str:
    return f"hello {name}" if name in {"x", "y", "z"} else (1.5, b"-", "a", "ab-c")[3]
"""


REPO = Path(__file__).resolve().parents[3]


def compiled_elsewhere(before, env):
    code = (
        f"import sys\n{before}\nfrom stager.layers.bytecode import compile_module\n"
        f"sys.stdout.buffer.write(compile_module({SOURCE!r}, 'm.py'))\n"
    )
    argv, env = [sys.executable, "-c", code], {**os.environ, **env}
    return subprocess.run(argv, env=env, cwd=REPO, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("before", "env"),
    [
        ("", {}),
        ("", {"PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1", "PYTHONOPTIMIZE": "2"}),
        ("import asyncio, unittest.mock; compile('greet = name = x = 1', 'x', 'exec')", {}),
        ("keep = [sys.intern(c) for c in ('x', 'y', 'a', 'greet', 'operating' + '_system')]", {}),
    ],
)
def test_what_the_process_did_before_does_not_show(before, env):
    assert compiled_elsewhere(before, env) == compile_module(SOURCE, "m.py")


def test_what_does_not_compile_is_left_alone():
    deep = b"f=" + b"lambda:" * 1500 + b"1"  # it compiles, and is too deep for marshal
    nonsense = (b"print 'two'\n", b"{{ template }} =\n", b"\0", b"# coding: nonsense\n")
    for source in (*nonsense, b"\xff\xfe", b"(" * 999, deep):
        assert compile_module(source, "m.py") is None


def test_test_modules_of_test_suites_get_no_bytecode():
    """But what lies beside them, which packages do import."""
    tests = ("pandas/tests/frame/test_api.py", "tests/test_it.py", "p/test/thing_test.py")
    beside = ("p/tests/__init__.py", "p/tests/conftest.py", "p/tests/helpers.py")
    others = ("pandas/core/frame.py", "numpy/testing/test_utils.py", "p/test_util.py")
    compiled = (*beside, *others, "p/attests/test_x.py")
    assert tuple(filter(is_worth_compiling, (*tests, *compiled))) == compiled


# --- Bytecode for other versions of Python, made by Pythons of these versions


FILES = {
    "one/__init__.py": "NAME = 'one'\n",
    "one/match.py": "def f(x):\n    return {c for c in 'abc'} | {x}\n",
    "one/template.py": "{{ not python }} =\n",
    "one/tests/test_it.py": "def test_it(): pass\n",
    "one/data.txt": "no module",
}


def other(program):
    """The target of a Python of another version, and that Python as a compiler."""
    target = Target(python=Path(program).name.removeprefix("python"), platform=HOST.platform)
    compiler = find_compiler(target, Path(program))
    assert compiler.version.startswith(f"{target.python}.")
    return target, compiler


@pytest.mark.parametrize("program", OTHERS)
def test_a_wheel_has_bytecode_that_the_other_python_runs(program, tmp_path, store):
    target, compiler = other(program)
    source = replace(source_of(make_wheel(tmp_path, "one", files=FILES)), compiler=compiler)
    made = layers_in(store, source, target=target)
    assert made.notes == ()
    files = contents(store.layer(made.layers[0].id))
    site = f"lib/python{target.python}/site-packages"
    names = [name for name in files if name.endswith(".pyc")]
    compiled = [bytecode_path(f"{site}/{name}", target) for name in list(FILES)[:2]]
    assert sorted(names) == sorted(compiled)
    for name in names:
        assert files[name][:8].hex() == compiler.magic + "01000000", "unchecked, of that version"
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "match.pyc").write_bytes(files[compiled[1]])  # without its source
    code = "import match, sys; print(sorted(match.f('d')))"
    done = subprocess.run(
        [program, "-c", code], cwd=tmp_path / "away", capture_output=True, text=True, check=False
    )
    assert done.stdout == "['a', 'b', 'c', 'd']\n", done.stderr
    record = files[f"{site}/one-1.0.dist-info/RECORD"].decode()
    assert f"one/__pycache__/match.cpython-{target.python.replace('.', '')}.pyc" in record


def test_for_another_processor_modules_are_compiled_all_the_same(tmp_path, store):
    """The version that runs this needs no other process."""
    arm = replace(HOST, platform="manylinux_2_28_aarch64")
    assert find_compiler(HOST) is None
    assert find_compiler(arm) is None
    source = source_of(make_wheel(tmp_path, "one", files=FILES))
    assert layers_in(store, source, target=arm).notes == ()
    assert layer_id(source, arm) == layer_id(source, HOST)


def test_without_a_python_of_that_version_there_is_no_compiler(tmp_path):
    shim = tmp_path / "python3.98"  # as a version manager leaves on PATH
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    target = Target(python="3.98", platform=HOST.platform)
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    assert find_compiler(target, env=env) is None
    assert find_compiler(target, tmp_path / "gone") is None
    talks = tmp_path / "talks"
    talks.write_text("#!/bin/sh\necho loading modules\necho 3.98.1 aa0d0d0a\n")
    talks.chmod(0o755)
    assert find_compiler(target, talks) is None


def test_how_a_layer_was_compiled_is_part_of_its_id(tmp_path):
    source = source_of(make_wheel(tmp_path, "one"))
    target = Target(python="3.98", platform=HOST.platform)
    first = Compiler(program=Path("/a/python"), version="3.98.1", magic="aa0d0d0a")
    moved = first._replace(program=Path("/b/python"), version="3.98.2")
    newer = first._replace(magic="ab0d0d0a")
    ids = [layer_id(replace(source, compiler=one), target) for one in (None, first, moved, newer)]
    assert ids[1] == ids[2], "where it lies does not matter"
    assert len(set(ids)) == 3


# --- Compiling the modules of a large wheel beside its unpacking: the same bytes, and nothing l...


COMMENT = "#" * 78 + "\n"
MODULES = 12


def text(number):
    """A module whose length is mostly comment, which costs little to compile."""
    return f"VALUE = {number}\ndef f{number}(x): return x + VALUE\n" + COMMENT * (
        LARGE // MODULES // len(COMMENT) + 1
    )


LARGE_FILES = {
    "large/__init__.py": "",
    **{f"large/m{number}.py": text(number) for number in range(MODULES)},
    "large/template.py": "{{ not python }} =\n",
    "large/tests/test_it.py": "def test_it(): pass\n",
    "large/data.txt": "no module",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A wheel of as much source as it takes."""
    return make_wheel(tmp_path_factory.mktemp("large"), "large", files=LARGE_FILES)


def no_children():
    """Whether no process of multiprocessing is left."""
    return not multiprocessing.active_children()


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_a_layer_has_the_bytecode_of_every_module(large, store, jobs):
    made = layers_in(store, source_of(large), jobs=jobs)
    found = contents(store.layer(made.layers[0].id))
    site = f"lib/python{HOST.python}/site-packages"
    modules = [name for name in LARGE_FILES if name.endswith(".py")][:-2]
    for name in modules:
        source = LARGE_FILES[name].encode()
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


def test_a_wheel_that_changes_meanwhile_is_told(large, tmp_path):
    changed = pytest.raises(StagerError, match=r"large-1\.0.*large/m1\.py changed while it was b")
    with compile_in_parallel(large, HOST, 2) as ahead, changed:
        ahead.take("large/m1.py", source_hash(b"another"))


@pytest.mark.usefixtures("slow")
def test_a_process_that_was_killed_is_told(large, tmp_path):
    with compile_in_parallel(large, HOST, 2) as ahead:
        (child,) = multiprocessing.active_children()
        child.kill()
        with pytest.raises(StagerError, match=r"large-1\.0.* modules was killed") as caught:
            ahead.take("large/m1.py", b"")
    assert "--jobs 1" in (caught.value.hint or "")
    assert no_children()


def noise_at(data, place):
    """The archive with random bytes at a place."""
    at = int(len(data) * place)
    return data[:at] + os.urandom(40) + data[at + 40 :]


def no_text(data):
    """The archive with a name that is no UTF-8, and says it is."""
    data = data.replace(b"large/template.py", b"large/t\xff\xfeplate.py")
    assert data.count(b"\xff\xfeplate.py") >= 2  # in the header and in the directory
    flags = data.rfind(b"PK\x01\x02", 0, data.rfind(b"\xff\xfeplate.py")) + 8
    return data[:flags] + b"\x00\x08" + data[flags + 2 :]


@pytest.mark.parametrize(
    "damage", [partial(noise_at, place=0.02), partial(noise_at, place=0.9), no_text]
)
def test_a_damaged_wheel_is_refused_as_ever(large, tmp_path, damage, store):
    damaged = tmp_path / large.name
    damaged.write_bytes(damage(large.read_bytes()))
    with pytest.raises(WheelError, match=r"large-1\.0"):
        layers_in(store, source_of(damaged), jobs=4)
    assert left_in_tmp(store) == []
    assert list(store.layers.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(116, "Stale file handle"), MemoryError()])
def test_modules_that_a_process_could_not_read_are_not_taken_for_unreadable_python(
    large, tmp_path, monkeypatch, error
):
    def read(archive, name):
        if name == "large/m7.py":
            raise error
        with archive.open(name) as member:
            return member.read()

    monkeypatch.setattr(zipfile.ZipFile, "read", read)
    failure = pytest.raises(StagerError, match=rf"not be compiled: {type(error).__name__}")
    with compile_in_parallel(large, HOST, 2) as ahead, failure:
        ahead.take("large/m7.py", b"")


@pytest.mark.usefixtures("slow")
def test_an_error_in_the_block_ends_all(large):
    with pytest.raises(KeyError), compile_in_parallel(large, HOST, 8):
        raise KeyError
    assert no_children()


def test_they_end_with_the_process_that_started_them(large):
    code = f"""
import os, time
from pathlib import Path
from stager.layers import bytecode as ahead
from stager.core.values import Target
def compile_module(source, path):  # asked for once the process will end with its parent
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
ahead.compile_module = compile_module
with ahead.compile_in_parallel(Path({str(large)!r}), Target.from_host(), 4):
    time.sleep(600)
"""
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=REPO) as parent:
        children = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    assert until(lambda: not any(map(is_alive, children)), pause=0.02), children
