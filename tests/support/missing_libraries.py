"""A machine that lacks a shared library which this one has, as a command in a namespace sees it."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.support.namespaces import entering
from tests.support.needs import lacks
from tests.support.processes import run

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
    argv = [python, "-I", "-S", "-c", _MAPPED, module]
    for line in run(argv).stdout.splitlines():
        if line.startswith(("/lib", "/usr/lib")) and "/python" not in line:
            return Path(line)
    lacks("linked python", f"{module} of {python} needs no library of the system")


def changes(library: Path, scratch: Path) -> dict[str, Path]:
    """The files to mount, by path, over a folder with links to all but a library."""
    folder, kept, shown = library.parent, scratch / "kept", scratch / "shown"
    for made in (kept, shown):
        made.mkdir(parents=True)
    for path in folder.iterdir():
        if path.resolve() != library:
            (shown / path.name).symlink_to(kept / path.name)
    return {str(kept): folder, str(folder): shown}


def without(library: Path, scratch: Path) -> list[str]:
    pairs = changes(library, scratch).items()
    lines = [shlex.join(["mount", "--bind", str(other), path]) for path, other in pairs]
    return entering("-m", "\n".join(lines))
