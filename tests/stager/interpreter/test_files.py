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
from stager.interpreter import Installation, bundled, faults_elsewhere, find
from stager.layers.layer_build import make_layers
from stager.layers.source import layer_id
from tests.support.building import contents, index_of
from tests.support.needs import lacks, needs
from tests.support.own_pythons import movable_python


@pytest.fixture(scope="module")
def own():
    return movable_python()


@pytest.fixture(scope="module")
def python(own):
    return bundled(find(str(own.prefix), own.target), own.target, ())


def paths(interpreter):
    assert interpreter.source.tree is not None
    return [file.path for file in interpreter.source.tree.files]


def test_what_goes_and_what_stays(own, python):
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


def test_headers_stay_where_the_settings_say_so(own, python):
    header = f"include/python{own.target.python}/Python.h"
    assert header in paths(python)
    without = bundled(find(str(own.prefix), own.target), own.target, ("headers",))
    assert header not in paths(without)
    assert layer_id(without.source, own.target) != layer_id(python.source, own.target)


def test_what_the_nodes_must_have_is_said(own, python):
    note = python.note()
    for name, files in python.foreign.items():
        assert f"{name} ({files[0].partition('.')[0]}" in note
    assert bool(note) == bool(python.foreign)


def test_files_that_cannot_be_read_are_named(tmp_path):
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
    (library / "lib-dynload" / "_gone.so").unlink()
    (library / "lib-dynload" / "_bad.so").symlink_to("/proc/self/mem")  # it opens; reading fails
    with pytest.raises(ConfigError, match=f"a file in {tmp_path} cannot be read: Input/output"):
        bundled(made, target, ("headers",))


def test_a_static_program_is_refused(tmp_path):
    """As uv had for musl: it starts anywhere, and loads no extension module."""
    needs("compiler")
    target = Target.of_host()
    (tmp_path / "bin").mkdir()
    source = tmp_path / "main.c"
    source.write_text("int main(void) {return 0;}")
    program = tmp_path / "bin" / "python3"
    subprocess.run(["gcc", "-static", "-o", str(program), str(source)], check=True)
    made = Installation(prefix=tmp_path, program="bin/python3", version=f"{target.python}.1")
    with pytest.raises(ConfigError, match="is linked statically"):
        bundled(made, target, ())


STATIC = ("-Wl,--export-dynamic,--whole-archive", "{archive}", "-Wl,--no-whole-archive", "-lm")


@pytest.mark.parametrize(
    ("linked", "beside"),
    [
        (("{shared}",), "lib/python{python}/EXTERNALLY-MANAGED"),
        ((*STATIC, "-Wl,-rpath,$ORIGIN/../lib"), "conda-meta/history"),
    ],
    ids=["uv", "conda"],
)
def test_one_that_is_laid_out_as_others_are(own, tmp_path, linked, beside):
    """A program like those of uv until 2025, which names libpython by path, or of conda and of uv
    since, which has it inside; with links to the folder, and files that others put there."""
    made = laid_out(own, tmp_path, linked)
    (made / beside.format(python=own.target.python)).parent.mkdir(exist_ok=True)
    (made / beside.format(python=own.target.python)).touch()
    link = tmp_path / "link"
    link.symlink_to(made.name)
    found = find(str(link), own.target)
    assert found.prefix == made
    source = bundled(found, own.target, ()).source
    env = unpacked(source, own.target, tmp_path / "env")
    made.rename(tmp_path / "gone")
    assert faults_elsewhere(env, own.target.python) == []
    libraries = {path.name for path in (env / "python" / "lib").glob("lib*.so*")}
    assert libraries == ({f"libpython{own.target.python}.so.1.0"} if len(linked) == 1 else set())


def laid_out(own, place, linked):
    """A copy of a Python with a program of its own, in a folder as uv calls it."""
    needs("compiler")
    python = own.target.python
    made = place / f"cpython-{python}.99-linux-{own.target.machine}-gnu"
    (made / "bin").mkdir(parents=True)
    left_out = shutil.ignore_patterns("site-packages", "__pycache__", "test", "*.a")
    library = f"lib/python{python}"
    shutil.copytree(own.prefix / library, made / library, ignore=left_out)
    (made / library / "lib-dynload" / ".empty").touch()
    name = f"libpython{python}.so.1.0"
    archive = next(iter((own.prefix / library).glob(f"config-*/libpython{python}.a")), None)
    if archive is None or not (own.prefix / "lib" / name).is_file():
        lacks("movable python", "the one here has no libpython")
    shutil.copy(own.prefix / "lib" / name, made / "lib")
    shared, main = place / "named.so", place / "main.c"
    main.write_text("int Py_BytesMain(int c, char **v) {return 1;}")
    named = f"-Wl,-soname,$ORIGIN/../lib/{name}"
    subprocess.run(["gcc", "-shared", "-fPIC", named, "-o", str(shared), str(main)], check=True)
    main.write_text(
        "int Py_BytesMain(int, char **); int main(int c, char **v) {\nreturn Py_BytesMain(c, v); }"
    )
    options = [option.format(shared=shared, archive=archive) for option in linked]
    program = made / "bin" / f"python{python}"
    subprocess.run(["gcc", "-o", str(program), str(main), *options], check=True)
    return made


def unpacked(source, target, env):
    """Make the layer of a Python, and unpack it."""
    store = Store(Path(os.environ["OFFLINE_ROOT"]))
    (layer,) = make_layers([source], store=store, target=target, jobs=2).layers
    stored = store.layer(layer.id)
    modes = {entry.path: entry.mode for entry in index_of(stored).files}
    for path, data in contents(stored).items():
        (env / path).parent.mkdir(parents=True, exist_ok=True)
        (env / path).write_bytes(data)
        (env / path).chmod(modes[path])
    return env


def test_it_runs_in_another_place_and_a_plain_copy_does_not_prove_it(own, python, tmp_path):
    env = unpacked(python.source, own.target, tmp_path / "env")
    assert faults_elsewhere(env, own.target.python) == []

    program = env / "python" / "bin" / own.program.name
    argv = [str(program), "-v", "-c", "import json.decoder"]
    done = subprocess.run(argv, env={}, capture_output=True, text=True, check=True)
    cached = f"{env}/python/lib/python{own.target.python}/json/__pycache__/decoder.cpython-"
    assert f"code object from '{cached}" in done.stderr
    assert "wrote" not in done.stderr, "no module was compiled again"

    killing = env / "python" / "lib" / f"python{own.target.python}" / "lib-dynload" / "_aa.so"
    killing.touch()
    (killing.parents[1] / "_aa.py").write_text("import os\nos.abort()\n")
    (fault,) = faults_elsewhere(env, own.target.python)
    assert fault == "its Python ends elsewhere when it imports _aa: exit status -6"
    killing.unlink()

    if python.source.interpreter is not None and python.source.interpreter.run_paths:
        plain = (own.prefix / "bin" / own.program.name).read_bytes()
        program.write_bytes(plain)
        (fault,) = faults_elsewhere(env, own.target.python)
        assert fault.startswith(f"its Python uses {own.prefix}/lib/libpython")
    (env / "python" / "lib" / f"python{own.target.python}" / "encodings").rename(env / "gone")
    (fault,) = faults_elsewhere(env, own.target.python)
    assert fault.startswith("its Python does not start elsewhere")
