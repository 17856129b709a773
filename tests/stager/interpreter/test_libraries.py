"""What the dynamic loader is told in real libraries, and which of them go with a Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stager.core import elf
from stager.core.errors import ConfigError, StagerError
from stager.interpreter import libraries_of
from stager.layers.source import Interpreter
from stager.layers.tree import TreeFile
from tests.support.needs import needs

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
    return libraries_of(prefix, PROGRAM, [MODULE])


def file_of(prefix, path):
    source = prefix / path
    return TreeFile(path=path, source=source, mode=0o755, size=source.stat().st_size)


def test_what_the_loader_is_told(prefix):
    header = elf.read(prefix / PROGRAM)
    assert header is not None
    assert header.needed[0] == "libown.so.1"
    assert header.run_path == f"{prefix}/lib"
    data = (prefix / PROGRAM).read_bytes()
    assert data[header.run_path_at :].startswith(f"{prefix}/lib\0".encode())
    assert Path(header.loader).is_file()
    assert header.glibc >= (2, 0)
    module = elf.read(prefix / MODULE)
    assert module is not None
    assert (module.loader, module.run_path) == ("", "")


@pytest.mark.parametrize("length", [0, 5, 20, 70, 1000])
def test_what_is_cut_short_is_no_library(prefix, length):
    path = prefix / "short.so"
    path.write_bytes((prefix / MODULE).read_bytes()[:length])
    header = elf.read(path)
    assert header is None or header.needed == ()


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


def test_a_relative_run_path_is_left_alone(prefix):
    run_path = "-Wl,-rpath,$ORIGIN/../lib"
    source = "int o(void); int main(void) {return o();}"
    compiled(prefix / PROGRAM, source, str(prefix / "lib" / "libown.so.1"), run_path)
    found = followed(prefix)
    assert (found.own, found.run_paths) == ({"libown.so.1": "lib/libown.so.1"}, {})


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
