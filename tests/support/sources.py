"""Source distributions and what is built from source: real setuptools, real gcc."""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.needs import needs
from tests.support.wheelhouse import Content, Member, Parts, as_bytes, escaped

_INSTALLERS_OWN = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}

_NATIVE_C = """\
#include <Python.h>

static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }

static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native_ext", "", -1, methods};

PyMODINIT_FUNC PyInit_native_ext(void) { return PyModule_Create(&module); }
"""


def make_sdist(
    folder: Path, name: str, version: str = "1.0", *, files: Mapping[str, Content] | None = None
) -> Path:
    """Write a setuptools source distribution; building it needs setuptools from the index."""
    package = escaped(name)
    stem = f"{package}-{version}"
    tree: dict[str, Content] = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = ["setuptools"]\n'
        'build-backend = "setuptools.build_meta"\n\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n\n'
        f'[tool.setuptools]\npackages = ["{package}"]\n',
        f"{package}/__init__.py": f"VERSION = {version!r}\n",
        **(files or {}),
    }
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, content in tree.items():
            member = tarfile.TarInfo(f"{stem}/{path}")
            member.size = len(as_bytes(content))
            archive.addfile(member, io.BytesIO(as_bytes(content)))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{stem}.tar.gz"
    target.write_bytes(gzip.compress(raw.getvalue(), mtime=0))
    return target


def build_native_wheel(folder: Path, source: Path) -> Path:
    """Compile a C extension ``native_ext`` with gcc, by pip and the installed setuptools.

    Its ``answer()`` returns 42, and its tag is this interpreter's and this machine's. The test is
    skipped where there is no compiler.
    """
    needs("compiler")
    source.mkdir(parents=True)
    (source / "native_ext.c").write_text(_NATIVE_C)
    (source / "setup.py").write_text(
        "from setuptools import Extension, setup\n"
        "setup(name='native-ext', version='1.0', py_modules=[],\n"
        "      ext_modules=[Extension('native_ext', ['native_ext.c'])])\n"
    )
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    argv += ["--no-index", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"the C extension did not build:\n{done.stderr}")
    return next(folder.glob("native_ext-1.0-*.whl"))


def repack_installed(folder: Path, name: str) -> Path:
    """Make a wheel of a pure distribution installed here, so that no index is needed for it.

    Building an sdist asks the index for setuptools; a test's index is a folder of wheels.
    """
    found = importlib.metadata.distribution(name)
    members = []
    for file in found.files or ():
        generated = file.parts[0] == ".." or file.suffix == ".pyc"
        if not generated and file.name not in {
            "RECORD",
            "INSTALLER",
            "REQUESTED",
            "direct_url.json",
        }:
            members.append(Member(name=file.as_posix(), data=file.read_binary()))
    info = next(m.name.split("/")[0] for m in members if m.name.endswith(".dist-info/METADATA"))
    filename = f"{escaped(name)}-{found.version}-py3-none-any.whl"
    return Parts(filename=filename, dist_info=info, members=tuple(members)).write(folder)
