"""The layer of a real Python: what goes into it, what stays, and where it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stager.core.errors import ConfigError
from stager.core.store import Store
from stager.core.values import Target
from stager.interpreter.files import BundledInterpreter, bundled
from stager.interpreter.installation import Installation, find
from stager.interpreter.start import faults_elsewhere
from stager.layers.build import make_layers
from stager.layers.source import layer_id
from tests.support.building import contents, index_of
from tests.support.own_pythons import OwnPython, movable_python


@pytest.fixture(scope="module")
def own() -> OwnPython:
    return movable_python()


@pytest.fixture(scope="module")
def python(own: OwnPython) -> BundledInterpreter:
    return bundled(find(str(own.prefix), own.target), own.target, ())


def paths(interpreter: BundledInterpreter) -> list[str]:
    assert interpreter.source.tree is not None
    return [file.path for file in interpreter.source.tree.files]


def test_what_goes_and_what_stays(own: OwnPython, python: BundledInterpreter) -> None:
    library = f"lib/python{own.target.python}"
    shipped = paths(python)
    assert {f"bin/python{own.target.python}", f"{library}/os.py", f"{library}/venv/__init__.py"} < {
        *shipped
    }
    folders = {part for path in shipped for part in path.split("/")[:-1]}
    assert not folders & {"site-packages", "__pycache__", "test", "tests", "man"}
    assert not [path for path in shipped if path.endswith((".a", ".pyc")) or "/config-3" in path]
    assert [path for path in shipped if path.startswith("bin/")] == [f"bin/{own.program.name}"]
    assert (python.source.kind, python.source.prefix) == ("python", "python")
    assert python.glibc > (2, 0)


def test_headers_stay_where_the_settings_say_so(own: OwnPython, python: BundledInterpreter) -> None:
    header = f"include/python{own.target.python}/Python.h"
    assert header in paths(python)
    without = bundled(find(str(own.prefix), own.target), own.target, ("headers",))
    assert header not in paths(without)
    assert layer_id(without.source, own.target) != layer_id(python.source, own.target)


def test_what_the_nodes_must_have_is_said(own: OwnPython, python: BundledInterpreter) -> None:
    note = python.note()
    for name, files in python.foreign.items():
        assert f"{name} ({files[0].partition('.')[0]}" in note
    assert bool(note) == bool(python.foreign)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """The modules are opened before anything else looks at the files."""
    target = Target.of_host()
    library = tmp_path / "lib" / f"python{target.python}"
    (library / "lib-dynload").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    shutil.copy2(os.path.realpath(sys.executable), tmp_path / "bin" / "python3")
    (library / "lib-dynload" / "_gone.so").symlink_to("nowhere.so")
    made = Installation(prefix=tmp_path, program="bin/python3", version=f"{target.python}.1")
    with pytest.raises(ConfigError, match=r"_gone\.so cannot be read: No such file") as caught:
        bundled(made, target, ("headers",))
    assert caught.value.hint.startswith("make these files readable")


def test_it_runs_in_another_place_and_a_plain_copy_does_not_prove_it(
    own: OwnPython, python: BundledInterpreter, tmp_path: Path
) -> None:
    store = Store(Path(os.environ["OFFLINE_ROOT"]))
    made = make_layers([python.source], store=store, target=own.target, jobs=2)
    (layer,) = made.layers
    env = tmp_path / "env"
    stored = store.layer(layer.id)
    modes = {entry.path: entry.mode for entry in index_of(stored).files}
    for path, data in contents(stored).items():
        (env / path).parent.mkdir(parents=True, exist_ok=True)
        (env / path).write_bytes(data)
        (env / path).chmod(modes[path])
    assert faults_elsewhere(env, own.target.python) == []

    program = env / "python" / "bin" / own.program.name
    argv = [str(program), "-v", "-c", "import json.decoder"]
    done = subprocess.run(argv, env={}, capture_output=True, text=True, check=True)
    cached = f"{env}/python/lib/python{own.target.python}/json/__pycache__/decoder.cpython-"
    assert f"code object from '{cached}" in done.stderr
    assert "wrote" not in done.stderr, "no module was compiled again"

    if python.source.interpreter is not None and python.source.interpreter.run_paths:
        plain = (own.prefix / "bin" / own.program.name).read_bytes()
        program.write_bytes(plain)
        (fault,) = faults_elsewhere(env, own.target.python)
        assert fault.startswith(f"its Python uses {own.prefix}/lib/libpython")
    (env / "python" / "lib" / f"python{own.target.python}" / "encodings").rename(env / "gone")
    (fault,) = faults_elsewhere(env, own.target.python)
    assert fault.startswith("its Python does not start elsewhere")
