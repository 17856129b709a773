"""Virtual environments with the files that every interpreter of an environment runs at start."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from bundle.environment.unpack import list_hook_files
from tests.support.processes import Done, run


def make_environment(root: Path, *requirements: str, python: str = sys.executable) -> Path:
    """Make one as unpacking a bundle leaves it; return its directory of packages."""
    subprocess.run([python, "-m", "venv", "--without-pip", root], check=True, timeout=300)
    (packages,) = root.glob("lib/python3*/site-packages")
    (root / "pkgs").symlink_to(packages.relative_to(root))
    if requirements:
        argv = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
        argv += ["--python", str(root / "bin" / "python"), *requirements]
        subprocess.run(argv, check=True, timeout=300)
    for path, data in list_hook_files(packages.parent.name.removeprefix("python")).items():
        (root / path).write_bytes(data)
    return packages


def surroundings(**variables: str) -> dict[str, str]:
    """This process's variables without any that could turn patches on, and ``variables``."""
    dropped = ("STAGER", "PYTHON", "CUDA_VISIBLE_DEVICES", "HF_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return {**inherited, **variables}


def run_python(env: Path, code: str, cwd: Path | None = None, **variables: str) -> Done:
    argv = [env / "bin" / "python", "-c", textwrap.dedent(code)]
    return run(argv, cwd=cwd, env=surroundings(**variables))
