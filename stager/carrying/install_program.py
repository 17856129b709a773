"""Installs stager from the file that carries it: ``python3 FILE install [DIR]``; stands alone."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence

USAGE = """\
usage: python3 FILE install [DIR]

Installs stager, which this file carries, into a virtual environment of its own. Needs no network.
  DIR    a new directory for it; default: ~/.local/share/stager
"""
TOOL = "tool/"
LIMIT = 1 << 30  # no wheel of the tool is larger, in bytes


class InstallRefused(Exception):
    """What cannot be done, and what to do about it."""


def main(carried: str, arguments: Sequence[str]) -> int:
    """Install, and return the exit code."""
    if arguments[:1] != ["install"] or len(arguments) > 2:
        sys.stderr.write(USAGE)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    named = arguments[1] if len(arguments) == 2 else "~/.local/share/stager"
    place = pathlib.Path(named).expanduser().absolute()
    handle_signals()
    try:
        install(pathlib.Path(carried), place)
    except InstallRefused as exc:
        message, hint = exc.args
        sys.stderr.write(f"error: {message}\nhint: {hint}\n")
        return 1
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        sys.stderr.write(
            f"error: {where}{exc.strerror or exc}\n"
            f"hint: name another directory: python3 {carried} install DIR; or free some space, "
            "there or in $TMPDIR\n"
        )
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return 0


def handle_signals() -> None:
    """Let signals end it as Ctrl-C does: nothing half-made is left behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def install(carried: pathlib.Path, place: pathlib.Path) -> None:
    """Make a virtual environment and install the carried wheels in it, or leave nothing."""
    refuse_other_python(carried)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InstallRefused(
            f"{place} is there already",
            f"remove it, or name another directory: python3 {carried} install DIR",
        )
    with tempfile.TemporaryDirectory(prefix="stager-install-") as folder:
        wheels = pathlib.Path(folder)
        names = unpack(carried, wheels)
        sys.stderr.write(f"installing stager into {place}\n")
        try:
            venv.create(place, symlinks=True, with_pip=False)
            fill(place, wheels, names)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
    programs, file = shlex.quote(str(place / "bin")), shlex.quote(str(carried))
    print(place / "bin" / "stager")
    sys.stderr.write(
        f"stager is installed; put it on PATH: export PATH={programs}:$PATH\n"
        f"then take the bundle out of this file: stager import {file}\n"
    )


def refuse_other_python(carried: pathlib.Path) -> None:
    """Refuse a Python that the carried wheels are not for."""
    with zipfile.ZipFile(carried) as program:
        target = json.loads(program.read("target.json"))
    wanted = (target["python"], target["machine"])
    here, machine = "{}.{}".format(*sys.version_info[:2]), os.uname().machine
    if (here, machine) == wanted:
        return
    hint = f"start it with that Python: python{wanted[0]} {carried} install"
    if machine != wanted[1]:
        hint = "export on the other side for this one, with its environment.platform"
    raise InstallRefused(
        f"this file carries stager for Python {wanted[0]} on {wanted[1]}; this is "
        f"Python {here} on {machine}",
        hint,
    )


def unpack(carried: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Unpack the wheels, each with the digest that it must have; return their names."""
    damaged = InstallRefused(f"{carried} is damaged", "copy it again, and compare `sha256sum`")
    names = []
    try:
        with tarfile.open(carried, "r:") as archive:
            for path, digest in digests_of_wheels(archive).items():
                data = content(archive, archive.getmember(path))
                if hashlib.sha256(data).hexdigest() != digest:
                    raise damaged
                names.append(path[len(TOOL) :])
                (folder / names[-1]).write_bytes(data)
    except (tarfile.TarError, ValueError, KeyError, TypeError, EOFError) as exc:
        raise damaged from exc
    if not names:
        raise damaged
    return names


def digests_of_wheels(archive: tarfile.TarFile) -> dict[str, str]:
    """Return the digest of each wheel by its place, as the file says; ValueError for a bad name."""
    label = archive.next()
    if label is None or label.name != "carried.json":
        raise ValueError("it does not begin with what it holds")
    parts = json.loads(content(archive, label))["parts"]
    found = {part["name"]: part["sha256"] for part in parts if part["name"].startswith(TOOL)}
    if any("/" in path[len(TOOL) :] for path in found):
        raise ValueError("a wheel has a bad name")
    return found


def content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return a member's content; ValueError for what is no file, or too large to be a wheel."""
    stream = archive.extractfile(member) if member.isreg() else None
    if stream is None or member.size > LIMIT:
        raise ValueError(f"{member.name} is no wheel")
    return stream.read()


def fill(place: pathlib.Path, wheels: pathlib.Path, names: Sequence[str]) -> None:
    """Install all wheels with the pip that is one of them."""
    pip = next(name for name in names if name.startswith("pip-"))
    argv = [str(place / "bin" / "python"), str(wheels / pip / "pip"), "install", "--quiet"]
    argv += ["--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    argv += [str(wheels / name) for name in names]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment = {**kept, "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise InstallRefused(
            "pip could not install the carried wheels (see above)",
            "where a wheel is not supported on this platform, the C library is older than the "
            "bundle's environment.platform: lower that on the other side, and export again; else "
            "free some space, or name another directory",
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[0], sys.argv[1:]))
