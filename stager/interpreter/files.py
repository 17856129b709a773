"""The files of a Python that go into a bundle, as the source of a layer."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle.environment.listing import OWN_PYTHON
from bundle.format.manifest import PYTHON
from bundle.protocol.digest import Digest

from ..config.sections import HEADERS
from ..core import elf
from ..core.errors import ConfigError
from ..core.store import sha256_of
from ..core.values import Target
from ..layers.source import Interpreter, LayerSource
from ..layers.tree import Collector, Tree, digest_of
from .installation import Installation
from .libraries import libraries_of

_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test")
"""Directories of a standard library that stay behind: packages, tests, and bytecode."""
_TEST_MODULE = re.compile(r"_?(test|xx).*\.so|_ctypes_test\..*")
"""Extension modules that only Python's own tests import."""
_HINT = "make these files readable, or name another Python with environment.interpreter"


@dataclass(frozen=True, kw_only=True)
class BundledInterpreter:
    """A Python that goes into a bundle."""

    source: LayerSource
    """The source of its layer."""
    glibc: tuple[int, int]
    """The oldest glibc that it runs with."""
    foreign: Mapping[str, Sequence[str]]
    """Shared libraries that it leaves to the nodes, with the files that need each."""
    program: Path
    """Its program, where it was found."""

    def note(self) -> str:
        """Return a note on what the nodes must have for it; empty for nothing."""
        if not self.foreign:
            return ""
        needs = "; ".join(
            f"{name} ({', '.join(_module(file) for file in files)})"
            for name, files in self.foreign.items()
        )
        return (
            f"Python {self.source.version} goes into the bundle, but some of its modules need "
            f"shared libraries that the nodes must have: {needs}. stager verify finds those that a "
            "node lacks; Pythons of uv need hardly any (uv python install)"
        )


def bundled(
    installation: Installation, target: Target, prune: Collection[str]
) -> BundledInterpreter:
    """Return the layer's source of a Python, and what it needs of a node.

    Raises:
        ConfigError: it cannot be moved, or is for another C library.
        StagerError: files that cannot be shipped.
    """
    prefix = installation.prefix
    folders, headers = [installation.library], installation.library.replace("lib/", "include/", 1)
    if HEADERS not in prune and (prefix / headers).is_dir():
        folders.append(headers)
    try:
        _refuse_other_libc(installation, target)
        paths = [path for folder in folders for path in _files(prefix, folder)]
        modules = sorted(path for path in paths if path.endswith(".so"))
        libraries = libraries_of(prefix, installation.program, modules)
    except OSError as exc:
        raise ConfigError(
            f"environment.interpreter: {exc.filename or f'a file in {prefix}'} cannot be read: "
            f"{exc.strerror}",
            hint=_HINT,
        ) from exc
    collector = Collector()
    for path in [installation.program, *paths, *libraries.own]:
        collector.add(path, str(prefix / path))
    tree = collector.tree(what=f"the Python in {prefix}", hint=_HINT)
    interpreter = Interpreter(program=prefix / installation.program, run_paths=libraries.run_paths)
    source = LayerSource(
        kind=PYTHON,
        name="cpython",
        version=installation.version,
        digest=_digest(tree, interpreter),
        tree=tree,
        prefix=OWN_PYTHON,
        size=tree.size * 2,
        interpreter=interpreter,
    )
    return BundledInterpreter(
        source=source,
        glibc=libraries.glibc,
        foreign=libraries.foreign,
        program=interpreter.program,
    )


def _refuse_other_libc(installation: Installation, target: Target) -> None:
    program = installation.prefix / installation.program
    header = elf.read(program)
    if header is None:
        raise ConfigError(
            f"environment.interpreter: {program} is not a program for 64-bit Linux",
            hint="name the Python itself, not a script that starts it",
        )
    if not header.loader:
        raise ConfigError(
            f"environment.interpreter: {program} is linked statically, and could load none of the "
            "extension modules of packages",
            hint="name a Python that the dynamic loader starts",
        )
    libc = "musl" if Path(header.loader).name.startswith("ld-musl") else "glibc"
    if libc != target.libc[0]:
        raise ConfigError(
            f"environment.interpreter: {program} is for {libc}, and the environment is for "
            f"{target.libc[0]}",
            hint="name a Python for the C library of environment.platform",
        )


def _files(prefix: Path, top: str) -> Iterator[str]:
    """Yield the paths of the shipped files; raise OSError rather than miss a directory."""
    config = re.compile(r"config-\d.*")
    for folder, names, files in os.walk(prefix / top, onerror=_raise, followlinks=False):
        names[:] = [name for name in names if name not in _LEFT_OUT and not config.fullmatch(name)]
        path = Path(folder).relative_to(prefix)
        dynload = path.name == "lib-dynload"
        for name in files:
            if not name.endswith((".a", ".pyc")) and not (dynload and _TEST_MODULE.fullmatch(name)):
                yield str(path / name)


def _raise(error: OSError) -> None:
    raise error


def _digest(tree: Tree, interpreter: Interpreter) -> Digest:
    digests = []
    for file in tree.files:
        if file.path in interpreter.run_paths:
            digests.append(Digest.of(interpreter.content(file)))
        else:
            digests.append(sha256_of(file.source))
    return digest_of(tree, digests)


def _module(file: str) -> str:
    return file.partition(".")[0] if ".cpython" in file else file
