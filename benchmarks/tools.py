"""The measured tool and its peers, installed in an environment of its own.

Only the standard library is imported here: this comes before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BenchError

REPO = Path(__file__).resolve().parents[1]
DEFAULT = REPO / ".venv-bench"
PEERS = ("pip>=25", "uv>=0.8", "pex>=2.60", "matplotlib>=3.8")
"""What is installed beside ``stager``; the newest that fits, and the report says which."""
PROGRAMS = {
    "tar": "tar",
    "gzip": "gzip",
    "zstd": "zstd",
    "mksquashfs": "squashfs-tools",
    "unsquashfs": "squashfs-tools",
    "pigz": "pigz",
    "strace": "strace",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
}
"""Programs, and the Debian package of each."""
_PATIENCE = 900


@dataclass(frozen=True, kw_only=True)
class Tools:
    """An environment with everything that is measured."""

    bin: Path
    """Where its programs are."""
    base: Path
    """The interpreter that it was made with: what a node without any environment would use."""

    def program(self, name: str) -> str:
        """The path of one of its programs."""
        return str(self.bin / name)

    @property
    def python(self) -> str:
        """Its interpreter."""
        return self.program("python")


def missing_programs(names: Sequence[str]) -> list[str]:
    """Those that are neither on ``PATH`` nor where daemons are."""
    places = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return [name for name in names if shutil.which(name, path=places) is None]


def need_programs(names: Sequence[str], env: Mapping[str, str], say: Callable[[str], None]) -> None:
    """See to it that programs are there; they are installed only in CI and as root.

    Raises:
        BenchError: some are missing.
    """
    missing = missing_programs(names)
    if not missing:
        return
    packages = sorted({PROGRAMS[name] for name in missing})
    if env.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {' '.join(packages)}")
        options = ["-qq", "-y", "--no-install-recommends"]
        _run(["apt-get", "update", "-qq"])
        _run(["apt-get", "install", *options, *packages])
        missing = missing_programs(names)
    if missing:
        raise BenchError(
            f"not found: {', '.join(missing)}",
            where="PATH",
            why="they are measured, or measure",
            fix=f"on Debian and Ubuntu: apt-get install {' '.join(packages)}",
        )


def base_python() -> Path:
    """The interpreter behind this one, should this one be of a virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def make_tools(folder: Path, say: Callable[[str], None]) -> Tools:
    """The environment with the peers and this checkout's ``stager``; kept from run to run.

    Raises:
        BenchError: it cannot be made.
    """
    base = base_python()
    tools = Tools(bin=folder / "bin", base=base)
    stamp = _stamp(base)
    noted = folder / ".filled"
    if noted.is_file() and noted.read_text() == stamp:
        return tools
    say(f"making {folder}: {', '.join(PEERS)} and stager from this checkout")
    venv.create(folder, with_pip=True, clear=True, symlinks=True)
    pip = [tools.python, "-m", "pip", "install", "--quiet"]
    _run([*pip, "--upgrade", "setuptools", *PEERS])
    _run([*pip, "--editable", str(REPO)])
    noted.write_text(stamp)
    return tools


def versions(tools: Tools) -> dict[str, str]:
    """Return what exactly is measured: versions of the tools and of the system's programs."""
    listed = json.loads(_run([tools.python, "-m", "pip", "list", "--format", "json"]))
    wanted = ("stager", "pip", "uv", "pex", "zstandard")
    found = {one["name"]: one["version"] for one in listed if one["name"] in wanted}
    options = {"tar": "--version", "zstd": "--version", "unsquashfs": "-version", "slurmctld": "-V"}
    for name, option in options.items():
        if shutil.which(name):
            text = _run([name, option], check=False)
            number = re.search(r"\d+(\.\d+)+", text)
            found[name] = number[0] if number else "?"
    return found


def _stamp(base: Path) -> str:
    text = (REPO / "pyproject.toml").read_bytes() + repr((str(base), PEERS, str(REPO))).encode()
    return hashlib.sha256(text).hexdigest()


def _run(argv: Sequence[str], *, check: bool = True) -> str:
    """Run a preparing command; its output.

    Raises:
        BenchError: it failed.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise BenchError("a command could not be run", where=" ".join(argv), why=str(exc)) from exc
    if check and done.returncode != 0:
        raise BenchError(
            f"{Path(argv[0]).name} failed with exit status {done.returncode}",
            where=" ".join(argv),
            why="\n    ".join(done.stderr.strip().splitlines()[-10:]),
            fix="see that a package index can be reached with pip's settings of this user",
        )
    return done.stdout
