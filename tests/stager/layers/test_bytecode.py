"""Bytecode made at build time: used as it is on every node, and the same bytes on every machine."""

from __future__ import annotations

import importlib.util
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
from stager.core.store import Store
from stager.core.values import Target
from stager.interpreter import find_compiler
from stager.layers import bytecode
from stager.layers.bytecode import (
    LARGE,
    Compiler,
    bytecode_path,
    compile_elsewhere,
    compile_in_parallel,
    compile_module,
    is_worth_compiling,
)
from stager.layers.source import LayerSource, layer_id
from tests.support.building import (
    HOST,
    OTHER,
    contents,
    layers_in,
    left_in_tmp,
    source_of,
    tree_of,
    wheel_of,
)
from tests.support.interpreters import OTHERS
from tests.support.processes import is_alive, until
from tests.support.wheelhouse import make_wheel, truncated

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


def test_the_header_says_never_to_look_at_the_source():
    data = compile_module(SOURCE, "m.py")
    assert data[:4] == importlib.util.MAGIC_NUMBER
    assert data[4:8] == b"\x01\0\0\0"
    assert data[8:16] == importlib.util.source_hash(SOURCE)


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


@pytest.mark.parametrize(
    "source",
    [
        b"print 'two'\n",
        b"{{ template }} =\n",
        b"\0",
        b"# coding: nonsense\n",
        b"\xff\xfe",
        b"(" * 999,
        b"f=" + b"lambda:" * 1500 + b"1",  # compiles, and is too deep for marshal
    ],
)
def test_what_does_not_compile_is_left_alone(source):
    assert compile_module(source, "m.py") is None


def test_its_place_is_where_the_interpreter_looks():
    assert bytecode_path("a/b.py", HOST) == importlib.util.cache_from_source("a/b.py")
    other = Target(python="3.13", platform=HOST.platform)
    assert bytecode_path("lib/x.y.py", other) == "lib/__pycache__/x.y.cpython-313.pyc"


@pytest.mark.parametrize(
    ("path", "worth"),
    [
        ("pandas/core/frame.py", True),
        ("pandas/tests/frame/test_api.py", False),
        ("tests/test_it.py", False),
        ("p/test/thing_test.py", False),
        ("p/tests/__init__.py", True),  # packages do import what lies beside the tests
        ("p/tests/conftest.py", True),
        ("p/tests/helpers.py", True),
        ("numpy/testing/test_utils.py", True),
        ("p/test_util.py", True),
        ("p/attests/test_x.py", True),
    ],
)
def test_test_modules_of_test_suites_get_no_bytecode(path, worth):
    assert is_worth_compiling(path) is worth


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


@pytest.mark.parametrize("program", OTHERS[-1:])
def test_a_project_too_and_the_same_bytes_each_time(program, tmp_path):
    target, compiler = other(program)
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    wheel = source_of(make_wheel(tmp_path, "one", files=FILES))
    tree = LayerSource.from_tree("project", "p", tree_of(folder), "project")
    sources = [replace(source, compiler=compiler) for source in (wheel, tree)]
    layers = []
    for number in (1, 2):
        store = Store(tmp_path / f"store{number}")
        made = layers_in(store, *sources, target=target, jobs=2)
        layers.append([store.layer(layer.id).read_bytes() for layer in made.layers])
    assert layers[0] == layers[1]
    names = contents(store.layer(made.layers[1].id))
    assert bytecode_path("project/one/match.py", target) in names
    assert bytecode_path("project/one/template.py", target) not in names


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


def test_it_has_the_libraries_of_environment_modules(tmp_path, monkeypatch):
    """Without them such a Python starts when it is looked for, and not when it compiles."""
    program, source = tmp_path / "python", b"A = 1\n"
    program.write_text(
        f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = /of/modules ] || exit 127\nexec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/modules")
    modules = compile_elsewhere(program, "one", [("one.py", source)], tmp_path)
    assert modules.take("one.py", source_hash(source))


def test_how_a_layer_was_compiled_is_part_of_its_id(tmp_path):
    source = source_of(make_wheel(tmp_path, "one"))
    target = Target(python="3.98", platform=HOST.platform)
    first = Compiler(program=Path("/a/python"), version="3.98.1", magic="aa0d0d0a")
    moved = first._replace(program=Path("/b/python"), version="3.98.2")
    newer = first._replace(magic="ab0d0d0a")
    ids = [layer_id(replace(source, compiler=one), target) for one in (None, first, moved, newer)]
    assert ids[1] == ids[2], "where it lies does not matter"
    assert len(set(ids)) == 3


@pytest.mark.parametrize("program", OTHERS[-1:])
def test_a_damaged_wheel_is_refused_for_what_it_is(program, tmp_path, store):
    target, compiler = other(program)
    source = replace(source_of(truncated(tmp_path)), compiler=compiler)
    with pytest.raises(WheelError, match="damaged or cut short"):
        layers_in(store, source, target=target)


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


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_module_that_is_worth_it_is_compiled(large, jobs):
    with compile_in_parallel(large, HOST, jobs) as ahead:
        assert jobs > 1 or no_children()
        left_out = [name for name in LARGE_FILES if name not in ahead]
        assert left_out == ["large/tests/test_it.py", "large/data.txt"]
        for name, is_python in (("large/m3.py", True), ("large/template.py", False)):
            source = LARGE_FILES[name].encode()
            expected = compile_module(source, name)
            assert ahead.take(name, source_hash(source)) == expected
            assert (expected is not None) is is_python


@pytest.mark.parametrize("case", ["small", "scripts and data", "another Python", "gone"])
def test_where_it_does_not_pay_nothing_is_compiled_ahead(large, tmp_path, case):
    """Scripts and data are no modules of the same name; who unpacks a wheel says it is gone."""
    target = OTHER if case == "another Python" else HOST
    if case == "small":
        files = {"small.py": COMMENT * (LARGE // len(COMMENT) - 1)}
        wheel = make_wheel(tmp_path, "small", files=files)
    elif case == "scripts and data":
        more = {f"large-1.0.data/purelib/{name}": text for name, text in LARGE_FILES.items()}
        wheel = make_wheel(tmp_path, "large", files={"large.py": "", **more})
    else:
        wheel = large if case == "another Python" else tmp_path / "gone.whl"
    with compile_in_parallel(wheel, target, 8) as ahead:
        assert ahead is None
        assert no_children()


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


@pytest.mark.parametrize("jobs", [1, 8])
def test_a_damaged_module_that_is_left_out_does_not_matter(tmp_path, jobs, store):
    helper = "large/tests/helper.py"
    tests = {"large/tests/__init__.py": "", helper: "# the last words of a helper\n" * 40_000}
    wheel = make_wheel(tmp_path, "large", files={**LARGE_FILES, **tests})
    with zipfile.ZipFile(wheel) as archive:
        crc = archive.getinfo(helper).CRC.to_bytes(4, "little")
    data = wheel.read_bytes()
    assert data.count(crc) == 2
    wheel.write_bytes(data.replace(crc, bytes(4)))
    source = LayerSource.from_wheel(wheel_of(wheel), ("tests",))
    made = layers_in(store, source, jobs=jobs)
    found = contents(store.layer(made.layers[0].id))
    assert not any("/tests/" in name for name in found)
    modules = [name for name in LARGE_FILES if name.endswith(".py") and "tests" not in name]
    assert sum(name.endswith(".pyc") for name in found) == len(modules) - 1  # but the template


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
    failure = pytest.raises(StagerError, match=r"large/m7\.py could not be compiled")
    with compile_in_parallel(large, HOST, 2) as ahead, failure as caught:
        ahead.take("large/m7.py", b"")
    assert type(error).__name__ in caught.value.context[0]


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
