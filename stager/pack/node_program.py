"""The program that runs on the nodes: the far side, as one file that Python can run."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.files import read_bytes
from ..core.store import Store

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
    return make_zip(dict(sorted(content.items())), zipfile.ZIP_STORED)


def make_zip(content: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return a zip of files whose bytes depend on nothing but these."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, data in content.items():
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = compression
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, data)
    return memory.getvalue()


def _modules(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        path = f"{name}/{item.name}"
        if item.is_dir():
            yield from _modules(item, path)
        elif item.name.endswith(".py"):
            yield path, item.read_bytes()


# --- The node program with bytecode beside its modules, so that no process of a job compiles them

# Compiling takes longer than most phases. Other Pythons ignore bytecode that they cannot use.

_DIGITS = 64  # length of the digest at the end of the file, which a zip takes for a comment


def find_compiled_program(program: Path, store: Store) -> Path:
    """Return the program with bytecode; make it if missing or damaged, where that is allowed."""
    final = program.with_name(f"{program.stem}.{sys.implementation.cache_tag}.pyz")
    if not _is_whole(final, program.stem):
        if not os.access(final.parent, os.W_OK):
            return program
        data = add_bytecode(read_bytes(program))
        with store.publish(final) as partial:
            partial.write_bytes(data)
    return final


def add_bytecode(program: bytes) -> bytes:
    """Return a zip of modules, each one's bytecode before its source, with a digest at the end."""
    # Not before they are needed: a build that changes nothing makes no program.
    from bundle.driver.transports.agent_program import STRIPPED, agent_modules

    from ..layers.bytecode import compile_module

    made: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(program)) as source:
        for name in source.namelist():
            text = source.read(name)
            bytecode = compile_module(text, name) if name.endswith(".py") else None
            if bytecode is not None:
                made[f"{name}c"] = bytecode
            made[name] = text
    made |= {f"{STRIPPED}{name}": text for name, text in agent_modules(program).items()}
    # The last two bytes are the length of the comment, which follows.
    content = make_zip(made)[:-2] + _DIGITS.to_bytes(2, "little")
    return content + _seal(hashlib.sha256(program).hexdigest(), content)


def _seal(program: str, content: bytes) -> bytes:
    return hashlib.sha256(program.encode() + content).hexdigest().encode()


def _is_whole(path: Path, program: str) -> bool:
    try:
        data = read_bytes(path)
    except OSError:
        return False
    return _seal(program, data[:-_DIGITS]) == data[-_DIGITS:]
