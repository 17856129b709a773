"""Builds from source: what they need is known at once, and a failed one says what to do."""

from __future__ import annotations

import zipfile
from dataclasses import replace

import pytest
from packaging.utils import canonicalize_name

from stager.core.errors import ResolveError, WheelError
from stager.core.store import Store
from stager.core.values import Digest
from stager.lock.build_source import (
    BuildSettings,
    advise_on_failed_build,
    extract_build_output,
    list_certain_builds,
    refuse_without_nvcc,
)
from stager.lock.indexes import Indexes
from stager.lock.lock import ResolveOptions, make_lock
from stager.lock.pip import NoNodeError
from stager.wheels import WheelSource
from tests.support.sources import make_sdist, own_backend, repack_installed
from tests.support.wheelhouse import make_wheel

FLASH = canonicalize_name("flash-attn")
NATIVE = """\
import os
import needed_to_build
from setuptools import Extension, setup

open("pure_or_not/made.py", "w").write(f"JOBS = {os.environ.get('MAX_JOBS')!r}\\n")
setup(ext_modules=[Extension("pure_or_not.native", ["native.c"])] if EXTENSION else [])
"""
NATIVE_C = """\
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", "", -1, NULL};
PyMODINIT_FUNC PyInit_native(void) { return PyModule_Create(&module); }
"""


def without_nvcc(monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("stager.lock.build_source.find_nvcc", lambda env: None)


@pytest.mark.parametrize(
    ("name", "places", "named", "sure"),
    [
        ("flash-attn", Indexes(), False, True),
        ("numpy", Indexes(), True, False),
        ("flash-attn", Indexes(extra_index_urls=("https://wheels.example/simple",)), False, False),
        ("flash-attn", Indexes(find_links=("https://wheels.example/",)), True, True),
        ("flash-attn", Indexes(find_links=("WHEELS",)), True, False),
        ("cuda-thing", Indexes(find_links=("WHEELS",)), False, True),
        ("cpp-thing", Indexes(find_links=("WHEELS",)), False, False),
    ],
)
def test_what_needs_nvcc_is_known_before_any_look_up(tmp_path, name, places, named, sure):
    make_wheel(tmp_path, "flash-attn", "2.8.3+cu12torch2.8")
    calls = "from torch.utils.cpp_extension import {0}\nsetup(ext_modules=[{0}('x', [])])\n"
    for kind in ("cuda", "cpp"):
        extension = "CUDAExtension" if kind == "cuda" else "CppExtension"
        make_sdist(tmp_path, f"{kind}-thing", files={"setup.py": calls.format(extension)})
    links = tuple(str(tmp_path) if one == "WHEELS" else one for one in places.find_links)
    places = Indexes(find_links=links, extra_index_urls=places.extra_index_urls)
    wanted = canonicalize_name(name)
    builds = BuildSettings(in_environment=frozenset([wanted] if named else []))
    assert list_certain_builds([wanted], builds, places) == ([name] if sure else [])


def test_without_nvcc_it_is_refused(monkeypatch, tmp_path):
    without_nvcc(monkeypatch)
    with pytest.raises(ResolveError, match="flash-attn: to be built from source") as caught:
        refuse_without_nvcc(["flash-attn"], BuildSettings())
    assert "module load cuda" in caught.value.hint
    refuse_without_nvcc([], BuildSettings())
    refuse_without_nvcc(["flash-attn"], BuildSettings(launcher=("srun",)))
    skipping = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    refuse_without_nvcc(["flash-attn"], BuildSettings(variables=skipping))


def test_nvcc_of_the_build_environment_counts(tmp_path):
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    refuse_without_nvcc(["flash-attn"], BuildSettings(variables={"CUDA_HOME": str(tmp_path)}))


def test_a_wheel_is_kept_for_what_it_was_built_with():
    source = Digest.of(b"source")
    plain, with_jobs = BuildSettings(), BuildSettings(variables={"MAX_JOBS": "4"})
    inside = BuildSettings(in_environment=frozenset([FLASH]))
    assert plain.key(FLASH, source, ["torch 1"]) == source
    keys = {with_jobs.key(FLASH, source, []), inside.key(FLASH, source, ["torch 1"])}
    keys |= {inside.key(FLASH, source, ["torch 2"]), source}
    keys.add(inside.key(FLASH, source, ["torch 2", "numpy 1"]))
    assert len(keys) == 5
    assert all(key.startswith(source) for key in keys)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("ModuleNotFoundError: No module named 'torch.utils'", 'no-build-isolation = ["x"]'),
        ("OSError: CUDA_HOME environment variable is not set", "stager build --on-node"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS"),
        ("error: command '/usr/bin/gcc' failed with exit code 1", "a compiler or header"),
        ("something else", "find-links"),
    ],
)
def test_what_to_do_about_a_failed_build(line, remedy):
    begin = "  error: subprocess\n  ╰─> [2 lines of output]\n      building x\n"
    output = f"{begin}      {line}\n      [end of output]\n\n  note: no problem with pip\n"
    assert extract_build_output(output)[-1].strip() == line
    assert "end of output" not in "".join(extract_build_output(output))
    assert remedy in advise_on_failed_build("x", output)


# --- real builds ---------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "offline")


@pytest.fixture
def house(index_env, wheelhouse):
    """The index, with a package that a build imports, and setuptools."""
    make_wheel(wheelhouse, "needed-to-build", files={"needed_to_build/__init__.py": "X = 1\n"})
    repack_installed(wheelhouse, "setuptools")
    return wheelhouse


def locked(spec, root, store):
    options = ResolveOptions(resolver="uv")
    return make_lock(spec, path=root / "pylock.toml", store=store, options=options)


@pytest.mark.parametrize("extension", [False, True], ids=["pure", "extension"])
def test_a_build_imports_what_only_the_environment_has(ask, root, store, house, extension):
    """Its dependencies cannot be known without a build either: its metadata is dynamic."""
    files = {
        "setup.py": NATIVE.replace("EXTENSION", str(extension)),
        "native.c": NATIVE_C,
        "pyproject.toml": '[build-system]\nrequires = ["setuptools"]\n'
        'build-backend = "setuptools.build_meta"\n'
        '[project]\nname = "pure-or-not"\nversion = "1.0"\ndynamic = ["dependencies"]\n'
        '[tool.setuptools]\npackages = ["pure_or_not"]\ninclude-package-data = false\n',
    }
    make_sdist(house, "pure-or-not", files=files)
    asked = ("pure-or-not", "needed-to-build", "setuptools")
    with pytest.raises(ResolveError, match="pure-or-not") as caught:
        locked(ask(*asked), root, store)
    assert 'no-build-isolation = ["pure-or-not"]' in str(caught.value.hint)
    spec = ask(*asked, no_build_isolation=["pure-or-not"], build_env={"MAX_JOBS": 4})
    lock = locked(spec, root, store)
    source = WheelSource(spec=spec, store=store, offline=False)
    wheels = source.fetch(lock)
    (wheel,) = (wheel for wheel in wheels if wheel.name == "pure-or-not")
    with zipfile.ZipFile(wheel.path) as archive:
        assert archive.read("pure_or_not/made.py") == b"JOBS = '4'\n"
        assert any(name.endswith(".so") for name in archive.namelist()) == extension
    assert replace(source, offline=True).fetch(lock) == wheels


def test_a_failed_build_shows_its_end(ask, root, store, house):
    setup = 'import sys\nif "bdist_wheel" in sys.argv:\n    sys.exit("no compiler can do this")\n'
    setup += "from setuptools import setup\nsetup()\n"
    make_sdist(house, "broken-one", files={"setup.py": setup})
    spec = ask("broken-one")
    lock = locked(spec, root, store)
    with pytest.raises(WheelError) as caught:
        WheelSource(spec=spec, store=store, offline=False).fetch(lock)
    context = caught.value.context
    assert "the end of the build of broken-one 1.0:" in context
    assert any(line.startswith("  | ") and "no compiler can do this" in line for line in context)
    assert context[-1].startswith("broken-one: ")


def test_a_failed_build_of_a_folder_shows_its_end(ask, root, store):
    folder = own_backend(root / "broken")
    (folder / "backend.py").write_text("def build_wheel(*rest):\n    raise OSError('no room')\n")
    with pytest.raises(ResolveError) as caught:
        locked(ask("./broken"), root, store)
    assert caught.value.context[-1].endswith("| OSError: no room")


def test_a_wheel_in_a_folder_is_preferred(ask, root, store, house):
    """To a newer sdist, too, of a package that would have to be built in the environment."""
    make_wheel(root / "prebuilt", "flash-attn", "2.7.0")
    make_sdist(house, "flash-attn", "2.8.3")
    lock = locked(ask("flash-attn", find_links=["prebuilt"]), root, store)
    (file,) = lock.files
    assert (str(file.version), file.is_wheel, len(file.sha256)) == ("2.7.0", True, 64)


def test_on_a_node_nothing_is_fetched(ask, root, store, house, tmp_path):
    """The launcher stands for ``srun``, and takes the network away as a node has none."""
    make_sdist(house, "from-source")
    log = tmp_path / "log"
    wrapper = tmp_path / "on-node"
    wrapper.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nexport PIP_INDEX_URL=http://127.0.0.1:9/\nexec "$@"\n'
    )
    wrapper.chmod(0o755)
    spec = replace(ask("from-source"), builds=BuildSettings(launcher=(str(wrapper),)))
    lock = locked(ask("from-source"), root, store)
    (wheel,) = WheelSource(spec=spec, store=store, offline=False).fetch(lock)
    assert wheel.path.name == "from_source-1.0-py3-none-any.whl"
    (line,) = log.read_text().splitlines()
    assert "pip wheel" in line
    assert "--no-index" in line


def test_where_slurm_gives_no_node_no_build_has_failed(ask, root, store, house, tmp_path):
    make_sdist(house, "from-source")
    wrapper = tmp_path / "srun"
    said = "srun: error: Unable to allocate resources: Invalid partition name specified"
    wrapper.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    wrapper.chmod(0o755)
    spec = replace(ask("from-source"), builds=BuildSettings(launcher=(str(wrapper),)))
    lock = locked(ask("from-source"), root, store)
    with pytest.raises(NoNodeError) as caught:
        WheelSource(spec=spec, store=store, offline=False).fetch(lock)
    assert caught.value.context == (said,)
