"""Odd wheels, each with what other people's builds have put into it: installed as uv does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from stager.lock.uv import require_uv
from tests.support.building import HOST, SITE, contents, layer_of
from tests.support.wheelhouse import Member, make_wheel, parts

Make = Callable[[Path, str], Path]
_OURS = ("/INSTALLER", "/RECORD", "/REQUESTED", "/direct_url.json", "/uv_cache.json")
"""Files that each installer writes for itself."""


def _wheel(**options):
    return lambda folder, name: make_wheel(folder, name, **options)


def _parts(change):
    return lambda folder, name: change(parts(name)).write(folder)


def _with(path, data):
    """A wheel with one more member; ``INFO`` in its path is the wheel's ``.dist-info``."""
    return _parts(
        lambda base: base.with_members(Member(name=path.replace("INFO", base.dist_info), data=data))
    )


ODD: dict[str, Make] = {
    "one-module": _wheel(files={"one_module.py": "x = 1\n"}),
    "namespace-a": _wheel(files={"shared_space/a/__init__.py": "A = 1\n"}),
    "namespace-b": _wheel(files={"shared_space/b/__init__.py": "B = 1\n"}),
    "empty": _wheel(files={}),
    "data-etc": _wheel(data={"data/etc/odd/conf.d/x.conf": "x", "data/var/y": ""}),
    "data-assets": _wheel(data={"data/assets/odd.bin": "x", "data/project/odd.txt": "x"}),
    "purelib-in-data": _wheel(files={}, data={"purelib/pure_in_data/__init__.py": ""}),
    "platlib-in-data": _wheel(files={}, data={"platlib/plat_in_data/__init__.py": ""}),
    "headers": _wheel(data={"headers/headers.h": "", "headers/sub/more.h": ""}),
    "path-file": _wheel(files={"odd_path.pth": "import sys\n", "path_file.py": ""}),
    "unicode": _wheel(files={"uni/d\u00e9j\u00e0.txt": "x", "uni/\u6570.bin": b"\0", "uni.py": ""}),
    "spaces": _wheel(files={"spa ces/a b.py": "x = 1\n", "spa ces/__init__.py": ""}),
    "stray-bytecode": _wheel(files={"stray/__init__.py": "", "stray/old.pyc": b"x"}),
    "bad-syntax": _wheel(files={"bad_syntax/template.py": "{{ name }} =\n"}),
    "deep": _wheel(files={"/".join(["deep"] * 30) + "/x.py": ""}),
    "UpperCase": _wheel(files={"UpperCase/__init__.py": ""}, spelled="UpperCase"),
    "platform": _wheel(tag=f"{HOST.python_tag}-{HOST.python_tag}-linux_{HOST.machine}"),
    "abi3": _wheel(tag=f"cp38-abi3-manylinux_2_17_{HOST.machine}"),
    "vendored-info": _with("odd_vendor/other-1.0.dist-info/METADATA", b"Name: other\n"),
    "licences-in-info": _with("INFO/licenses/a/LICENSE", b"x"),
    "sboms-in-info": _with("INFO/sboms/x.json", b"{}"),
    "program": _wheel(entry_points="[console_scripts]\nodd-program = program:main\n"),
    "with-extra": _wheel(entry_points="[console_scripts]\nodd-extra = a.b:C.d [fast]\n"),
    "script": _wheel(scripts={"odd-script": "#!python\nprint(1)\n", "odd.sh": "#!/bin/sh\n"}),
    "python-script": _wheel(scripts={"python-odd": "#!/bin/sh\n", "odd.bin": b"\x7fELF"}),
    "script-and-program": _wheel(
        entry_points="[console_scripts]\nodd-both = script_and_program:main\n",
        scripts={"odd-both": "#!python\n"},
    ),
    "no-newline": _with("INFO/top_level.txt", b"a"),
}  # fmt: skip
"""Makes each wheel, by the name of its package."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The files of all odd wheels as uv installs them, and the folder with the wheels."""
    folder = tmp_path_factory.mktemp("odd")
    wheels = [make(folder, name) for name, make in ODD.items()]
    place = folder / "env"
    argv = [*require_uv(), "pip", "install", "-q", "--no-deps", "--offline", "--no-cache"]
    argv += ["--target", str(place), *map(str, wheels)]
    subprocess.run(argv, check=True, timeout=200)
    files = {
        path.relative_to(place).as_posix(): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }
    return files, folder


def test_the_files_are_those_of_uv(installed):
    theirs, folder = installed
    ours: dict[str, bytes] = {}
    for wheel in sorted(folder.glob("*.whl")):
        for path, data in contents(layer_of(wheel)).items():
            ours.setdefault(path, data)
    compared = {_as_target(path): data for path, data in ours.items() if _is_of_wheel(path)}
    expected = {path: data for path, data in theirs.items() if _is_of_wheel(path)}
    assert sorted(compared) == sorted(expected)
    different = [path for path in compared if compared[path] != expected[path]]
    # Programs find their Python each in its way; the script has a line that is replaced.
    assert [path for path in different if not path.startswith("bin/odd-")] == []


def _is_of_wheel(path):
    return not path.endswith(_OURS) and "__pycache__/" not in path and path != ".lock"


def _as_target(path):
    """Return where uv puts a file of an environment with ``--target``."""
    headers = f"include/site/python{HOST.python}/"
    if path.startswith(headers):
        return f"include/{path.removeprefix(headers)}"
    return path.removeprefix(f"{SITE}/")
