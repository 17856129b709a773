"""Builds from source: what they need is known at once, and a failed one says what to do."""

from __future__ import annotations

import zipfile
from dataclasses import replace

import pytest
from packaging.utils import canonicalize_name

from stager.core.errors import ResolveError
from stager.core.values import Digest
from stager.lock.build_source import (
    BuildSettings,
    advise_on_failed_build,
    build_requires,
    extract_build_output,
    list_certain_builds,
    refuse_without_nvcc,
)
from stager.lock.indexes import Indexes
from stager.wheels import WheelSource
from tests.support.locks import fails
from tests.support.sources import make_sdist, repack_installed
from tests.support.wheelhouse import make_wheel

FLASH = canonicalize_name("flash-attn")
NATIVE = """\
import os
import needed_to_build
from setuptools import Extension, setup

open("native/made.py", "w").write(f"JOBS = {os.environ.get('MAX_JOBS')!r}\\n")
setup(ext_modules=[Extension("native.native", ["native.c"])])
"""
NATIVE_C = """\
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", "", -1, NULL};
PyMODINIT_FUNC PyInit_native(void) { return PyModule_Create(&module); }
"""


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
    with monkeypatch.context() as patched:
        patched.setattr("stager.lock.build_source.find_nvcc", lambda env: None)
        with pytest.raises(ResolveError, match="flash-attn: to be built from source") as caught:
            refuse_without_nvcc(["flash-attn"], BuildSettings())
        assert "module load cuda" in caught.value.hint
        refuse_without_nvcc([], BuildSettings())
        refuse_without_nvcc(["flash-attn"], BuildSettings(launcher=("srun",)))
        skipping = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
        refuse_without_nvcc(["flash-attn"], BuildSettings(variables=skipping))
    compiler = tmp_path / "bin" / "nvcc"  # of the build environment
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    refuse_without_nvcc(["flash-attn"], BuildSettings(variables={"CUDA_HOME": str(tmp_path)}))


def test_a_wheel_is_kept_for_what_it_was_built_with():
    source = Digest.of(b"source")
    plain, with_jobs = BuildSettings(), BuildSettings(variables={"MAX_JOBS": "4"})
    inside = BuildSettings(in_environment=frozenset([FLASH]))
    assert plain.key(FLASH, source, ["torch 1"]) == source
    keys = {with_jobs.key(FLASH, source, []), source}
    keys |= {inside.key(FLASH, source, beside) for beside in (["t 1"], ["t 2"], ["t 2", "n 1"])}
    assert len(keys) == 5
    assert all(key.startswith(source) for key in keys)


def test_what_a_build_needs_first_is_read_from_its_source(tmp_path):
    """Setuptools and wheel, where nothing says (PEP 518)."""
    old = {"setup.py": "from setuptools import setup\nsetup()\n"}
    for place in (tmp_path, make_sdist(tmp_path, "old", files={**old, "pyproject.toml": ""})):
        assert build_requires(place) == ["setuptools", "wheel"]
    named = {"pyproject.toml": "[build-system]\nrequires = ['flit', 'cython>=3']\n"}
    assert build_requires(make_sdist(tmp_path, "new", files=named)) == ["flit", "cython>=3"]


def test_what_to_do_about_a_failed_build():
    for line, remedy in (
        ("ModuleNotFoundError: No module named 'torch.utils'", 'no-build-isolation = ["x"]'),
        ("OSError: CUDA_HOME environment variable is not set", "stager build --on-node"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS"),
        ("error: command '/usr/bin/gcc' failed with exit code 1", "a compiler or header"),
        ("something else", "find-links"),
    ):
        begin = "  error: subprocess\n  ╰─> [2 lines of output]\n      building x\n"
        output = f"{begin}      {line}\n      [end of output]\n\n  note: no problem with pip\n"
        assert extract_build_output(output)[-1].strip() == line
        assert "end of output" not in "".join(extract_build_output(output))
        assert remedy in advise_on_failed_build("x", output)


@pytest.fixture
def house(index_env, wheelhouse):
    """The index, with a package that a build imports, and setuptools."""
    make_wheel(wheelhouse, "needed-to-build", files={"needed_to_build/__init__.py": "X = 1\n"})
    repack_installed(wheelhouse, "setuptools")
    return wheelhouse


def test_a_build_imports_what_only_the_environment_has(lock, ask, store, house):
    """Its dependencies cannot be known without a build either: its metadata is dynamic."""
    files = {
        "setup.py": NATIVE,
        "native.c": NATIVE_C,
        "pyproject.toml": '[build-system]\nrequires = ["setuptools"]\n'
        'build-backend = "setuptools.build_meta"\n'
        '[project]\nname = "native"\nversion = "1.0"\ndynamic = ["dependencies"]\n'
        '[tool.setuptools]\npackages = ["native"]\ninclude-package-data = false\n',
    }
    make_sdist(house, "native", files=files)
    asked = ("native", "needed-to-build", "setuptools")
    assert 'no-build-isolation = ["native"]' in fails(lock, *asked).hint
    settings = {"no_build_isolation": ["native"], "build_env": {"MAX_JOBS": 4}}
    made = lock(*asked, **settings)
    source = WheelSource(spec=ask(*asked, **settings), store=store, offline=False)
    wheels = source.fetch(made)
    (wheel,) = (wheel for wheel in wheels if wheel.name == "native")
    with zipfile.ZipFile(wheel.path) as archive:
        assert archive.read("native/made.py") == b"JOBS = '4'\n"
        assert any(name.endswith(".so") for name in archive.namelist())
    assert replace(source, offline=True).fetch(made) == wheels


def test_a_wheel_in_a_folder_is_preferred(lock, root, house):
    """To a newer sdist, too, of a package that would have to be built in the environment."""
    make_wheel(root / "prebuilt", "flash-attn", "2.7.0")
    make_sdist(house, "flash-attn", "2.8.3")
    (file,) = lock("flash-attn", find_links=["prebuilt"]).files
    assert (str(file.version), file.is_wheel, len(file.sha256)) == ("2.7.0", True, 64)
