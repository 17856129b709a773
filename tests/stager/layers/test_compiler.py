"""Bytecode for other versions of Python, made by Pythons of these versions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import source_hash
from pathlib import Path

import pytest

from stager.core.errors import StagerError, WheelError
from stager.core.store import Store
from stager.core.values import Target
from stager.interpreter import compiler_for
from stager.layers.bytecode import Compiler, bytecode_path, compile_elsewhere
from stager.layers.layer_build import make_layers
from stager.layers.source import LayerSource, layer_id
from tests.support.building import HOST, contents, source_of, tree_of
from tests.support.interpreters import OTHERS
from tests.support.wheelhouse import make_wheel, truncated

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
    compiler = compiler_for(target, Path(program))
    assert compiler is not None
    assert compiler.version.startswith(f"{target.python}.")
    return target, compiler


@pytest.mark.parametrize("program", OTHERS)
def test_a_wheel_has_bytecode_that_the_other_python_runs(program, tmp_path):
    target, compiler = other(program)
    store = Store(tmp_path / "store")
    source = replace(source_of(make_wheel(tmp_path, "one", files=FILES)), compiler=compiler)
    with store.lock():
        made = make_layers([source], store=store, target=target, jobs=1)
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
    tree = LayerSource.of_tree("project", "p", tree_of(folder), "project")
    sources = [replace(source, compiler=compiler) for source in (wheel, tree)]
    layers = []
    for number in (1, 2):
        store = Store(tmp_path / f"store{number}")
        with store.lock():
            made = make_layers(sources, store=store, target=target, jobs=2)
        layers.append([store.layer(layer.id).read_bytes() for layer in made.layers])
    assert layers[0] == layers[1]
    names = contents(store.layer(made.layers[1].id))
    assert bytecode_path("project/one/match.py", target) in names
    assert bytecode_path("project/one/template.py", target) not in names


def test_the_version_that_runs_this_needs_no_other_process():
    assert compiler_for(HOST) is None
    assert compiler_for(replace(HOST, platform="manylinux_2_28_aarch64")) is None


def test_for_another_processor_modules_are_compiled_all_the_same(tmp_path):
    store = Store(tmp_path / "store")
    source = source_of(make_wheel(tmp_path, "one", files=FILES))
    arm = replace(HOST, platform="manylinux_2_28_aarch64")
    with store.lock():
        made = make_layers([source], store=store, target=arm, jobs=1)
    assert made.notes == ()
    assert layer_id(source, arm) == layer_id(source, HOST)


def test_without_a_python_of_that_version_there_is_no_compiler(tmp_path):
    shim = tmp_path / "python3.98"  # as a version manager leaves on PATH
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    target = Target(python="3.98", platform=HOST.platform)
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    assert compiler_for(target, env=env) is None
    assert compiler_for(target, tmp_path / "gone") is None
    talks = tmp_path / "talks"
    talks.write_text("#!/bin/sh\necho loading modules\necho 3.98.1 aa0d0d0a\n")
    talks.chmod(0o755)
    assert compiler_for(target, talks) is None


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
    moved = replace(first, program=Path("/b/python"), version="3.98.2")
    newer = replace(first, magic="ab0d0d0a")
    ids = [layer_id(replace(source, compiler=one), target) for one in (None, first, moved, newer)]
    assert ids[1] == ids[2], "where it lies does not matter"
    assert len(set(ids)) == 3


@pytest.mark.parametrize("program", OTHERS[-1:])
def test_a_module_that_changes_meanwhile_is_told(program, tmp_path):
    _, compiler = other(program)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    source = [("one.py", b"A = 1\n")]
    modules = compile_elsewhere(compiler.program, "one-1.0", source, scratch)
    assert "one.py" in modules
    assert "two.py" not in modules
    with pytest.raises(StagerError, match=r"one-1\.0: one\.py changed while it was being read"):
        modules.take("one.py", b"another.")
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("program", OTHERS[-1:])
def test_a_damaged_wheel_is_refused_for_what_it_is(program, tmp_path):
    target, compiler = other(program)
    store = Store(tmp_path / "store")
    source = replace(source_of(truncated(tmp_path)), compiler=compiler)
    with store.lock(), pytest.raises(WheelError, match="damaged or cut short"):
        make_layers([source], store=store, target=target, jobs=1)
