"""The layer of the Python that a bundle brings: made relocatable, and compiled by itself."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import StagerError
from .bytecode import bytecode_path
from .compiler import compile_files
from .layer_file import LayerWriter
from .tree import Tree, TreeFile

if TYPE_CHECKING:
    from .layer_process import LayerWork
    from .source import LayerSource


@dataclass(frozen=True, kw_only=True)
class RunPath:
    """A run path in a program or shared library, and the one that replaces it."""

    at: int
    """Where it stands in the file."""
    old: bytes
    """The run path that is there."""
    new: bytes
    """The new one, which is not longer."""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The changes that make the layer of a Python out of its files."""

    program: Path
    """The program that compiles its modules."""
    run_paths: Mapping[str, RunPath]
    """The run paths that are replaced, by file."""

    def content(self, file: TreeFile) -> bytes:
        """Return a file as it is shipped.

        Raises:
            StagerError: it has changed since its run path was read.
        """
        data = file.source.read_bytes()
        run_path = self.run_paths.get(file.path)
        if run_path is None:
            return data
        end = run_path.at + len(run_path.old)
        if data[run_path.at : end] != run_path.old:
            raise StagerError(
                f"{file.source} changed while it was being packed",
                hint="another program is writing there; run the command again when it is done",
            )
        return data[: run_path.at] + run_path.new.ljust(len(run_path.old), b"\0") + data[end:]


def add_interpreter(
    writer: LayerWriter, source: LayerSource, interpreter: Interpreter, work: LayerWork
) -> list[str]:
    """Add the files of a Python, each module with its bytecode; return the files' digests.

    Raises:
        StagerError: files have changed; or it does not compile its modules.
    """
    tree = source.tree or Tree(files=(), links=(), skipped=())
    digests = []
    with tempfile.TemporaryDirectory(dir=work.scratch) as scratch:
        compiled = _compile(tree, interpreter, Path(scratch))
        for file in tree.files:
            path = f"{source.prefix}/{file.path}"
            data = io.BytesIO(interpreter.content(file))
            digests.append(writer.add(path, data, executable=file.mode == 0o755).sha256.hex())
            bytecode = compiled.get(file.path)
            if bytecode is not None and bytecode.is_file():
                writer.add(bytecode_path(path, work.target), io.BytesIO(bytecode.read_bytes()))
    return digests


def _compile(tree: Tree, interpreter: Interpreter, scratch: Path) -> dict[str, Path]:
    modules = [file for file in tree.files if file.path.endswith(".py")]
    files = [(module.source, module.path) for module in modules]
    compile_files(interpreter.program, files, scratch)
    return {module.path: scratch / str(number) for number, module in enumerate(modules)}
