"""A machine that lacks a shared library which this one has, as a command in a namespace sees it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from tests.support.namespaces import entering
from tests.support.needs import lacks

_MAPPED = """\
import sys
def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split(None, 5)[5].strip() for line in maps if "/" in line}
before = mapped()
module = __import__(sys.argv[1])
print(*sorted(mapped() - before - {getattr(module, "__file__", "")}), sep="\\n")
"""


def library_of(python: str, module: str) -> Path:
    """The system's library that a module of a Python needs; the test is skipped without one."""
    argv = [python, "-I", "-S", "-c", _MAPPED, module]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(("/lib", "/usr/lib")) and "/python" not in line:
            return Path(line)
    lacks("linked python", f"{module} of {python} needs no library of the system")


def without(library: Path, scratch: Path) -> list[str]:
    """The beginning of a command line that runs where a library is not there, by any name.

    Its folder is covered by one with links to all else.
    """
    folder, kept, shown = library.parent, scratch / "kept", scratch / "shown"
    names = [path.name for path in folder.iterdir() if path.resolve() == library]
    for made in (kept, shown):
        made.mkdir(parents=True)
    quoted = [shlex.quote(str(path)) for path in (folder, kept, shown)]
    gone = " ".join(f"{quoted[2]}/{shlex.quote(name)}" for name in names)
    shell = f"""\
mount --bind {quoted[0]} {quoted[1]}
mount -t tmpfs none {quoted[2]}
ln -s {quoted[1]}/* {quoted[2]}
rm {gone}
mount --bind {quoted[2]} {quoted[0]}"""
    return entering("-m", shell)
