"""The layer of a real Python: what goes into it, what stays, and where it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.system.processes import CompletedCommand
from stager.core.errors import ConfigError, StagerError
from stager.core.store import Store
from stager.core.values import Target
from stager.interpreter import (
    Installation,
    find_interpreter,
    follow_libraries,
    list_candidates,
    list_faults_elsewhere,
    make_bundled_interpreter,
)
from stager.layers.source import Interpreter, layer_id
from stager.layers.tree import TreeFile
from tests.support.building import HOST, contents, index_of, layers_in
from tests.support.needs import lacks, needs
from tests.support.own_pythons import movable_python


@pytest.fixture(scope="module")
def own():
    return movable_python()


@pytest.fixture(scope="module")
def python(own):
    return make_bundled_interpreter(find_interpreter(str(own.prefix), own.target), own.target, ())


def test_what_goes_and_what_stays(own, python):
    library = f"lib/python{own.target.python}"
    shipped = [file.path for file in python.source.tree.files]
    program = f"bin/{own.program.name}"
    assert {program, f"{library}/os.py", f"{library}/venv/__init__.py"} < {*shipped}
    folders = {part for path in shipped for part in path.split("/")[:-1]}
    assert not folders & {"site-packages", "__pycache__", "test", "tests", "man"}
    assert not [path for path in shipped if path.endswith((".a", ".pyc")) or "/config-3" in path]
    assert [path for path in shipped if path.startswith("bin/")] == [program]
    assert (python.source.kind, python.source.prefix) == ("python", "python")
    assert python.glibc > (2, 0)
    for name, files in python.foreign.items():  # the nodes must have it
        assert f"{name} ({files[0].partition('.')[0]}" in python.note()
    # Headers stay where the settings say so.
    found = find_interpreter(str(own.prefix), own.target)
    without = make_bundled_interpreter(found, own.target, ("headers",)).source
    header = f"include/python{own.target.python}/Python.h"
    assert header in shipped
    assert header not in [file.path for file in without.tree.files]
    assert layer_id(without, own.target) != layer_id(python.source, own.target)


def test_files_that_cannot_be_read_are_named(tmp_path):
    """The modules are opened before anything else looks at the files."""
    target = Target.from_host()
    library = tmp_path / "lib" / f"python{target.python}"
    (library / "lib-dynload").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    shutil.copy2(os.path.realpath(sys.executable), tmp_path / "bin" / "python3")
    (library / "lib-dynload" / "_gone.so").symlink_to("nowhere.so")
    made = Installation(prefix=tmp_path, program="bin/python3", version=f"{target.python}.1")
    with pytest.raises(ConfigError, match=r"_gone\.so cannot be read: No such file") as caught:
        make_bundled_interpreter(made, target, ("headers",))
    assert caught.value.hint.startswith("make these files readable")


def test_a_static_program_is_refused(tmp_path):
    """As uv had for musl: it starts anywhere, and loads no extension module."""
    needs("compiler")
    target = Target.from_host()
    (tmp_path / "bin").mkdir()
    source = tmp_path / "main.c"
    source.write_text("int main(void) {return 0;}")
    program = tmp_path / "bin" / "python3"
    subprocess.run(["gcc", "-static", "-o", str(program), str(source)], check=True)
    made = Installation(prefix=tmp_path, program="bin/python3", version=f"{target.python}.1")
    with pytest.raises(ConfigError, match="linked statically"):
        make_bundled_interpreter(made, target, ())


STATIC = ("-Wl,--export-dynamic,--whole-archive", "{archive}", "-Wl,--no-whole-archive", "-lm")


CONDA = ((*STATIC, "-Wl,-rpath,$ORIGIN/../lib"), "conda-meta/history")


@pytest.mark.parametrize(
    ("linked", "beside"),
    [
        pytest.param(("{shared}",), "lib/python{python}/EXTERNALLY-MANAGED", id="uv"),
        pytest.param(*CONDA, id="conda", marks=pytest.mark.full),
    ],
)
def test_one_that_is_laid_out_as_others_are(own, tmp_path, linked, beside):
    """A program like those of uv until 2025, which names libpython by path, or of conda and of uv
    since, which has it inside; with links to the folder, and files that others put there."""
    made = laid_out(own, tmp_path, linked)
    (made / beside.format(python=own.target.python)).parent.mkdir(exist_ok=True)
    (made / beside.format(python=own.target.python)).touch()
    link = tmp_path / "link"
    link.symlink_to(made.name)
    found = find_interpreter(str(link), own.target)
    assert found.prefix == made
    source = make_bundled_interpreter(found, own.target, ()).source
    env = unpacked(source, own.target, tmp_path / "env")
    made.rename(tmp_path / "gone")
    assert list_faults_elsewhere(env, own.target.python) == []
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
    (layer,) = layers_in(store, source, target=target, jobs=2).layers
    stored = store.layer(layer.id)
    modes = {entry.path: entry.mode for entry in index_of(stored).files}
    for path, data in contents(stored).items():
        (env / path).parent.mkdir(parents=True, exist_ok=True)
        (env / path).write_bytes(data)
        (env / path).chmod(modes[path])
    return env


def test_it_runs_in_another_place_and_a_plain_copy_does_not_prove_it(own, python, tmp_path):
    env = unpacked(python.source, own.target, tmp_path / "env")
    assert list_faults_elsewhere(env, own.target.python) == []

    program = env / "python" / "bin" / own.program.name
    argv = [str(program), "-v", "-c", "import json.decoder"]
    done = subprocess.run(argv, env={}, capture_output=True, text=True, check=True)
    cached = f"{env}/python/lib/python{own.target.python}/json/__pycache__/decoder.cpython-"
    assert f"code object from '{cached}" in done.stderr
    assert "wrote" not in done.stderr, "no module was compiled again"

    killing = env / "python" / "lib" / f"python{own.target.python}" / "lib-dynload" / "_aa.so"
    killing.touch()
    (killing.parents[1] / "_aa.py").write_text("import os\nos.abort()\n")
    (fault,) = list_faults_elsewhere(env, own.target.python)
    assert fault == "its Python ends elsewhere when it imports _aa: exit status -6"
    killing.unlink()

    if python.source.interpreter is not None and python.source.interpreter.run_paths:
        plain = (own.prefix / "bin" / own.program.name).read_bytes()
        program.write_bytes(plain)
        (fault,) = list_faults_elsewhere(env, own.target.python)
        assert fault.startswith(f"its Python uses {own.prefix}/lib/libpython")
    (env / "python" / "lib" / f"python{own.target.python}" / "encodings").rename(env / "gone")
    (fault,) = list_faults_elsewhere(env, own.target.python)
    assert fault.startswith("its Python does not start elsewhere")


# --- Which Python of this machine a bundle brings, and which it refuses, with what to do


def refused(setting, target):
    with pytest.raises(ConfigError) as caught:
        find_interpreter(str(setting), target, os.environ)
    assert "environment.interpreter" in caught.value.message
    assert caught.value.hint
    return caught.value


def no_uv(argv, **_):
    raise StagerError(f"{argv[-1]}: uv is not here")


def test_a_program_its_folder_a_link_or_a_virtual_environment_may_be_named(own, tmp_path):
    found = find_interpreter(str(own.prefix), own.target)
    assert (found.prefix, found.program) == (own.prefix, f"bin/{own.program.name}")
    assert found.library == f"lib/python{own.target.python}"
    (tmp_path / "link" / "bin").mkdir(parents=True)
    (tmp_path / "link" / "bin" / own.program.name).symlink_to(own.program)
    argv = [str(own.program), "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(argv, check=True)
    for place in (own.program, own.prefix / "bin", tmp_path / "link", tmp_path / "venv"):
        assert find_interpreter(str(place), own.target) == found


def test_another_version_is_refused(own):
    error = refused(own.program, HOST)
    assert f"environment.python asks for {HOST.python}" in error.message
    assert f"uv python install {HOST.python}" in error.hint
    missing = f"there is no file {own.prefix}/bin/python{HOST.python}"
    assert missing in refused(own.prefix, HOST).message


def test_what_is_no_python_is_refused(own, tmp_path):
    def said(path):
        return refused(path, own.target).message

    assert f"{tmp_path}/nowhere is not there" in said(tmp_path / "nowhere")
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho hello\n")
    assert str(script) in said(script)
    script.chmod(0o755)
    assert "is not a Python interpreter" in said(script)


def test_one_for_another_machine_is_refused(own):
    for platform in ("manylinux_2_28_s390x", f"musllinux_1_2_{HOST.machine}"):
        error = refused(own.prefix, replace(own.target, platform=platform))
        assert "the Python of this machine is for" in error.message


def test_of_a_shim_that_has_no_version_the_reason_is_shown(own, tmp_path):
    """As of pyenv's, whose last line is about something else."""
    shim = tmp_path / own.program.name
    shim.write_text("#!/bin/sh\necho 'pyenv: not found' >&2\necho 'See pyenv help' >&2\nexit 127\n")
    shim.chmod(0o755)
    error = refused(shim, own.target)
    assert f"{shim} does not work: exit status 127: pyenv: not found" in error.message
    assert "pyenv prefix" in error.hint
    shim.write_text(f'#!/bin/sh\nexec {own.program} "$@"\n')
    assert find_interpreter(str(shim), own.target).prefix == own.prefix


def test_pyenvs_newest_is_found(own, tmp_path):
    versions = tmp_path / "versions"
    minor = own.target.python
    for name in (f"{minor}.0", f"{minor}.10", f"{minor}.9"):
        (versions / name / "bin").mkdir(parents=True)
    real = versions / f"{minor}.9" / "bin" / own.program.name
    real.symlink_to(own.program)
    broken = versions / f"{minor}.10" / "bin" / own.program.name
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    env = {**os.environ, "PYENV_ROOT": str(tmp_path)}
    assert find_interpreter("bundled", own.target, env, run=no_uv).prefix == own.prefix
    real.unlink()
    with pytest.raises(ConfigError) as caught:
        find_interpreter("bundled", own.target, env, run=no_uv)
    assert f"there is no Python {minor} here" in caught.value.message
    assert any(str(broken) in line for line in caught.value.context)
    assert f"uv python install {minor}" in caught.value.hint


def test_of_uvs_builds_of_a_version_the_plain_one_comes_first(tmp_path):
    """The others need a newer processor, or another C library; the link is one of the folders."""
    names = [f"cpython-3.12.{number}-linux-{HOST.machine}" for number in (9, 11)]
    others = [f"{names[1]}{more}" for more in ("-gnu", "-musl", "_v3-gnu")]
    others.append(f"cpython-3.12.11+debug-linux-{HOST.machine}-gnu")
    for name in (f"{names[0]}-gnu", *others):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python3.12").touch()
    (tmp_path / f"cpython-3.12-linux-{HOST.machine}-gnu").symlink_to(others[0])

    def uv(argv, **_):
        return CompletedCommand(tuple(argv), 0, f"{tmp_path}\n", "")

    env = {"PYENV_ROOT": str(tmp_path / "none"), "PATH": ""}
    target = replace(HOST, python="3.12")
    found = [path.parents[1].name for path in list_candidates(target, env, uv)]
    assert found[0] == others[0]
    assert found[4] == f"{names[0]}-gnu"
    assert sorted(found[1:4]) == sorted(others[1:])


# --- What the dynamic loader is told in real libraries, and which of them go with a Python


PROGRAM, MODULE = "bin/python", "lib/dynload/m.so"


def compiled(target, source, *options):
    """A program or library from one line of C."""
    target.parent.mkdir(parents=True, exist_ok=True)
    code = target.parent / "code.c"
    code.write_text(source)
    subprocess.run(["gcc", "-o", str(target), str(code), *options], check=True)
    code.unlink()
    return target


def library(target, source, *options):
    named = f"-Wl,-soname,{target.name}"
    return compiled(target, source, "-shared", "-fPIC", named, *options)


@pytest.fixture
def prefix(tmp_path):
    """A folder like a Python's: a program, a module, their library, and one of somebody else's."""
    needs("compiler")
    place = tmp_path / "where-it-was-built"
    foreign = library(tmp_path / "elsewhere" / "libforeign.so.1", "int f(void) {return 1;}")
    own = library(place / "lib" / "libown.so.1", "int o(void) {return 42;}")
    run_path = f"-Wl,--enable-new-dtags,-rpath,{place}/lib"
    compiled(place / PROGRAM, "int o(void); int main(void) {return o();}", str(own), run_path)
    source = "int o(void); int f(void); int m(void) {return o() + f();}"
    library(place / MODULE, source, str(own), str(foreign))
    return place


def followed(prefix):
    return follow_libraries(prefix, PROGRAM, [MODULE])


def file_of(prefix, path):
    source = prefix / path
    return TreeFile(path=path, source=source, mode=0o755, size=source.stat().st_size)


def test_its_own_library_goes_with_it_and_another_is_left_to_the_nodes(prefix):
    found = followed(prefix)
    assert list(found.own.values()) == ["lib/libown.so.1"]
    assert found.foreign == {"libforeign.so.1": ["m.so"]}
    assert list(found.run_paths) == [PROGRAM], "what the program has loaded needs no run path"
    assert found.glibc > (0, 0)


def test_with_the_new_run_path_it_runs_in_another_place(prefix, tmp_path):
    found = followed(prefix)
    interpreter = Interpreter(program=prefix / PROGRAM, run_paths=found.run_paths)
    other = tmp_path / "other"
    for path in (PROGRAM, *found.own.values()):
        (other / path).parent.mkdir(parents=True, exist_ok=True)
        (other / path).write_bytes(interpreter.content(file_of(prefix, path)))
        (other / path).chmod(0o755)
    plain = shutil.copy2(prefix / PROGRAM, tmp_path / "plain")
    shutil.rmtree(prefix)
    assert subprocess.run([other / PROGRAM], env={}, check=False).returncode == 42
    assert subprocess.run([plain], env={}, check=False, capture_output=True).returncode == 127


def test_a_program_that_changes_meanwhile_is_noticed(prefix):
    interpreter = Interpreter(program=prefix / PROGRAM, run_paths=followed(prefix).run_paths)
    (prefix / PROGRAM).write_bytes(b"another one")
    with pytest.raises(StagerError, match="changed while it was being packed"):
        interpreter.content(file_of(prefix, PROGRAM))


@pytest.mark.parametrize("entry", ["$ORIGIN/../lib/libown.so.1", "{prefix}/lib/libown.so.1"])
def test_a_library_that_is_needed_by_its_path(prefix, tmp_path, entry):
    """As in a Python of uv's; the absolute one leads to this place only.

    A program needs a library under the name that the library gives itself.
    """
    needed = entry.format(prefix=prefix)
    named = library(tmp_path / "named.so", "int o(void) {return 1;}", f"-Wl,-soname,{needed}")
    source = "int o(void); int main(void) {return o();}"
    compiled(prefix / PROGRAM, source, str(named))
    if entry.startswith("{"):
        with pytest.raises(ConfigError, match="is not relocatable") as caught:
            followed(prefix)
        assert caught.value.context == (f"{PROGRAM}: it needs {needed}",)
        return
    own = prefix / "lib" / "libown.so.1"
    own.rename(own.with_name("libown.so.1.2"))
    own.symlink_to("libown.so.1.2")
    found = followed(prefix)
    assert (found.own, found.run_paths) == ({"libown.so.1": "lib/libown.so.1"}, {})
    assert found.foreign == {"libforeign.so.1": ["m.so"]}, "the module finds it loaded"
    moved = prefix.rename(tmp_path / "moved")
    assert subprocess.run([moved / PROGRAM], env={}, check=False).returncode == 42


def test_a_program_that_finds_its_libpython_elsewhere_is_refused(prefix, tmp_path):
    """As of a container, or of an environment module: by a setting that a node need not have."""
    shared = library(tmp_path / "lib" / "libpython3.12.so.1.0", "int p(void) {return 1;}")
    compiled(prefix / PROGRAM, "int p(void); int main(void) {return p();}", str(shared))
    with pytest.raises(ConfigError, match="is not relocatable") as caught:
        followed(prefix)
    (fault,) = caught.value.context
    assert fault.startswith(f"{PROGRAM}: it finds libpython3.12.so.1.0 by LD_LIBRARY_PATH, or in")


def test_a_run_path_without_room_is_refused(prefix, monkeypatch):
    """As a short absolute one would be; this one leads there from the folder itself."""
    monkeypatch.chdir(prefix)
    source = "int o(void); int main(void) {return o();}"
    library_of_it = str(prefix / "lib" / "libown.so.1")
    compiled(prefix / PROGRAM, source, library_of_it, "-Wl,-rpath,lib")
    with pytest.raises(ConfigError, match="is not relocatable") as caught:
        followed(prefix)
    assert caught.value.context == (f"{PROGRAM}: its run path lib has no room for $ORIGIN/../lib",)
    assert "uv python install" in caught.value.hint
