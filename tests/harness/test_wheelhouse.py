"""The fixtures themselves: pip and uv accept the correct wheels, and each damage is there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installer.sources import WheelFile

from tests.support.wheelhouse import DAMAGED, make_wheel, standard_set


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def test_pip_installs_the_standard_set(tmp_path: Path, index_env: dict[str, str]) -> None:
    names = ["alpha", "my-odd-name", "ns-one", "ns-two", "pth-pkg", "cli-tool", "schemes"]
    done = pip("install", "--target", str(tmp_path / "t"), *names)
    assert done.returncode == 0, done.stderr
    assert "beta-2.0" in done.stdout
    assert (tmp_path / "t/shared_ns/one/__init__.py").is_file()
    assert (tmp_path / "t/shared_ns/two/__init__.py").is_file()
    assert (tmp_path / "t/schemes_plat.py").is_file()
    script = (tmp_path / "t/bin/schemes-script").read_text()
    assert script.startswith(f"#!{sys.executable}\n")


def test_nothing_outside_the_folder_is_seen(index_env: dict[str, str]) -> None:
    done = pip("download", "packaging", "--no-deps", "--dest", os.devnull)
    assert done.returncode != 0
    assert "No matching distribution found for packaging" in done.stderr


def test_uv_resolves_from_the_folder(wheelhouse: Path) -> None:
    argv = ["uv", "pip", "compile", "-", "--no-index", "--find-links", str(wheelhouse)]
    done = subprocess.run(
        [sys.executable, "-m", *argv], input="alpha\n", capture_output=True, text=True, check=True
    )
    assert "beta==2.0" in done.stdout


def test_the_bytes_depend_on_the_arguments_alone(tmp_path: Path) -> None:
    one, two = standard_set(tmp_path / "1"), standard_set(tmp_path / "2")
    assert [p.name for p in one] == [p.name for p in two]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]


def test_correct_wheels_pass_validation(wheelhouse: Path) -> None:
    wheels = sorted(wheelhouse.iterdir())
    assert len(wheels) == 10
    for path in wheels:
        with WheelFile.open(path) as wheel:
            wheel.validate_record()


@pytest.mark.parametrize(
    "kind", ["truncated", "no-record", "wrong-hash", "unlisted", "wrong-dist-info"]
)
def test_damage_that_an_installer_finds(kind: str, tmp_path: Path) -> None:
    path = DAMAGED[kind](tmp_path)
    with pytest.raises(Exception, match=r".+") as caught, WheelFile.open(path) as wheel:
        wheel.validate_record()
    assert not isinstance(caught.value, (OSError, TypeError, AttributeError)), caught.value


def test_a_missing_file_is_in_record(tmp_path: Path) -> None:
    # The installer library looks from the archive to RECORD only, so it passes this one.
    with zipfile.ZipFile(DAMAGED["missing"](tmp_path)) as archive:
        assert b"bad/ghost.py," in archive.read("bad-1.0.dist-info/RECORD")
        assert "bad/ghost.py" not in archive.namelist()


def test_a_wrong_size_is_in_record(tmp_path: Path) -> None:
    with zipfile.ZipFile(DAMAGED["wrong-size"](tmp_path)) as archive:
        rows = archive.read("bad-1.0.dist-info/RECORD").decode().splitlines()
        name, _, size = rows[0].split(",")
        assert int(size) == archive.getinfo(name).file_size + 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [("parent", "../escaped.py"), ("absolute", "/tmp/escaped.py"), ("symlink", "bad/link.py")],
)
def test_a_hostile_member_is_stored_as_named(kind: str, name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(DAMAGED[kind](tmp_path)) as archive:
        assert name in archive.namelist()
        assert archive.testzip() is None


@pytest.mark.parametrize(
    ("kind", "is_type"),
    [("symlink", stat.S_ISLNK), ("device", stat.S_ISCHR), ("fifo", stat.S_ISFIFO)],
)
def test_a_special_member_has_its_type(kind: str, is_type, tmp_path: Path) -> None:
    with zipfile.ZipFile(DAMAGED[kind](tmp_path)) as archive:
        assert sum(is_type(info.external_attr >> 16) for info in archive.infolist()) == 1


def test_a_duplicated_member_is_there_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(DAMAGED["duplicated"](tmp_path)) as archive:
        assert archive.namelist().count("bad/__init__.py") == 2


def test_every_damage_is_listed_once_and_writes_one_file(tmp_path: Path) -> None:
    for kind, write in DAMAGED.items():
        assert write(tmp_path / kind).parent == tmp_path / kind
        assert [p.name for p in (tmp_path / kind).iterdir()] == ["bad-1.0-py3-none-any.whl"]


def test_the_compiled_extension_runs(native_wheel: Path, tmp_path: Path) -> None:
    assert not native_wheel.name.endswith("-none-any.whl")
    done = pip("install", "--no-index", "--target", str(tmp_path / "t"), str(native_wheel))
    assert done.returncode == 0, done.stderr
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 't')!r})\n"
    code += "import native_ext; print(native_ext.answer())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "42\n"


def test_pip_builds_the_sdist_from_the_folder(
    sdist: Path, index_env: dict[str, str], tmp_path: Path
) -> None:
    done = pip("wheel", "--no-deps", "--wheel-dir", str(tmp_path / "out"), "from-source")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["from_source-1.0-py3-none-any.whl"]


def test_options_reach_the_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path, "x", "2.5", tag="cp311-cp311-linux_x86_64", metadata_extra="License: MIT"
    )
    with zipfile.ZipFile(wheel) as archive:
        assert "License: MIT" in archive.read("x-2.5.dist-info/METADATA").decode()
        assert b"Root-Is-Purelib: false" in archive.read("x-2.5.dist-info/WHEEL")


def test_the_home_is_not_the_callers(isolated: Path) -> None:
    assert Path.home() == isolated
    assert Path(os.environ["OFFLINE_ROOT"]).is_relative_to(isolated.parents[0])
