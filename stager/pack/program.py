"""The program that runs on the nodes: the far side, as one file that Python can run."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

_EPOCH = (1980, 1, 1, 0, 0, 0)
_MAIN = b"""import sys

if sys.version_info < (3, 9):
    found = "%d.%d" % sys.version_info[:2]
    sys.exit("stager: this is Python " + found + "; the node program needs 3.9 or newer")

# A Ctrl-C while this imports ends it as it would end any other program, without a traceback.
import _signal

asked = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if asked:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from bundle.__main__ import main

if asked:
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def make_node_program() -> bytes:
    """Return the far side as one zip that Python can run: the modules of ``bundle``, unchanged."""
    content = {"__main__.py": _MAIN}
    content |= dict(_modules(resources.files("bundle"), "bundle"))
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(content):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, content[name])
    return memory.getvalue()


def _modules(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        path = f"{name}/{item.name}"
        if item.is_dir():
            yield from _modules(item, path)
        elif item.name.endswith(".py"):
            yield path, item.read_bytes()
