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
from tests.support.processes import run
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
    """Compile a C extension ``native_ext``, whose ``answer()`` is 42; skip without gcc."""
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
    done = run(argv)
    if done.returncode:
        raise RuntimeError(f"the C extension did not build:\n{done.stderr}")
    return next(folder.glob("native_ext-1.0-*.whl"))


def repack_installed(folder: Path, name: str) -> Path:
    """Make a wheel of a pure distribution installed here, so that no index is needed for it."""
    found = importlib.metadata.distribution(name)
    members = []
    for file in found.files or ():
        generated = file.parts[0] == ".." or file.suffix == ".pyc"
        if not generated and file.name not in _INSTALLERS_OWN:
            members.append(Member(name=file.as_posix(), data=file.read_binary()))
    info = next(m.name.split("/")[0] for m in members if m.name.endswith(".dist-info/METADATA"))
    filename = f"{escaped(name)}-{found.version}-py3-none-any.whl"
    return Parts(filename=filename, dist_info=info, members=tuple(members)).write(folder)


_OWN_BACKEND = """\
import base64, hashlib, zipfile
from pathlib import Path

NAME, HERE = {name!r}, Path(__file__).parent

def digest(text):
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()

def build_wheel(folder, config_settings=None, metadata_directory=None):
    info, name = f"{{NAME}}-1.0.dist-info", f"{{NAME}}-1.0-py3-none-any.whl"
    files = {{path.name: path.read_text() for path in HERE.glob("*.py") if path.stem != "backend"}}
    files[f"{{info}}/METADATA"] = f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: 1.0\\n"
    tags = "Root-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{{info}}/WHEEL"] = f"Wheel-Version: 1.0\\nGenerator: tests\\n{{tags}}"
    rows = [f"{{path}},sha256={{digest(text)}},{{len(text)}}\\n" for path, text in files.items()]
    files[f"{{info}}/RECORD"] = "".join([*rows, f"{{info}}/RECORD,,\\n"])
    with zipfile.ZipFile(Path(folder, name), "w") as wheel:
        for path, text in sorted(files.items()):
            wheel.writestr(zipfile.ZipInfo(path), text)
    return name
"""


def own_backend(folder: Path) -> Path:
    """Write a project of the folder's name that brings its own build backend: it needs no index."""
    name = escaped(folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n\n'
        f'[project]\nname = "{folder.name}"\nversion = "1.0"\n'
    )
    (folder / "backend.py").write_text(_OWN_BACKEND.format(name=name))
    (folder / f"{name}.py").write_text("VERSION = '1.0'\n")
    return folder


def own_sdist(folder: Path, name: str, fault: str = "") -> Path:
    """Write a source distribution, version 1.0, with its own build backend, which has a fault."""
    path, project = folder / f"{name}-1.0.tar.gz", own_backend(folder / name)
    with (project / "backend.py").open("a") as backend:
        backend.write(fault)
    with tarfile.open(path, "w:gz") as archive:
        archive.add(project, arcname=f"{name}-1.0")
    return path


def git_commit(folder: Path) -> str:
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    if not (folder / ".git").is_dir():
        subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a change"], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return done.stdout.strip()
