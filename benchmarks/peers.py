"""The commands of other tools: argv as pure functions, so that a reader sees all of it.

Every one works from a folder of wheels and asks no index.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LEVEL = 3
"""Of zstd, for the archives that ours is compared with."""

Argv = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The packages to install."""

    wheels: Path
    """A folder with every wheel."""
    requirements: Path
    """Which of them, pinned."""


def pip_install(python: str, wanted: Wanted, target: Path) -> Argv:
    """The lab handout's way: a plain folder of packages; pip compiles bytecode by itself."""
    return (
        *(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-index"),
        *("--find-links", str(wanted.wheels)),
        *("--target", str(target), "--requirement", str(wanted.requirements)),
    )


def uv_install(uv: str, python: str, wanted: Wanted, where: tuple[str, Path], cache: Path) -> Argv:
    """The same with uv, bytecode included.

    Args:
        uv: the program.
        python: the interpreter whose packages they are to be.
        wanted: what.
        where: ``("--target", folder)``, or ``("--python", interpreter)`` of an environment.
        cache: empty, as ours begins with nothing unpacked.
    """
    option, place = where
    chosen = () if option == "--python" else ("--python", python)
    return (
        *(uv, "pip", "install", "--quiet", "--no-index", "--compile-bytecode", *chosen),
        *("--find-links", str(wanted.wheels), "--cache-dir", str(cache)),
        *(option, str(place), "--requirement", str(wanted.requirements)),
    )


def pex(program: str, python: str, wanted: Wanted, made: Path) -> Argv:
    """One file with everything, stored, not compressed: what pex advises for large packages."""
    return (
        *(program, "--no-index", "--find-links", str(wanted.wheels), "--python", python),
        *("--no-compress", "--requirement", str(wanted.requirements)),
        *("--output-file", str(made)),
    )


def tar_gz(tree: Path, made: Path) -> Argv:
    """``tar czf``."""
    return ("tar", "czf", str(made), "-C", str(tree), ".")


def tar_zst(tree: Path, made: Path) -> Argv:
    """``tar`` with zstd on all CPUs."""
    return ("tar", "-I", f"zstd -{LEVEL} -T0", "-cf", str(made), "-C", str(tree), ".")


def squashfs(tree: Path, made: Path) -> Argv:
    """A squashfs image of the same tree, with zstd at the same level."""
    return (
        *("mksquashfs", str(tree), str(made), "-comp", "zstd"),
        *("-Xcompression-level", str(LEVEL), "-quiet", "-no-progress", "-noappend"),
    )


def untar_gz(archive: Path, target: Path) -> Argv:
    """``tar xzf``."""
    return ("tar", "xzf", str(archive), "-C", str(target))


def untar_zst(archive: Path, target: Path) -> Argv:
    """``tar --zstd -x``."""
    return ("tar", "--zstd", "-xf", str(archive), "-C", str(target))


def unsquashfs(image: Path, target: Path) -> Argv:
    """Unpack with two threads; it makes the directory itself."""
    return (
        *("unsquashfs", "-quiet", "-no-progress", "-processors", "2"),
        *("-dest", str(target / "tree"), str(image)),
    )


def venv(python: str, folder: Path) -> Argv:
    """A plain virtual environment."""
    return (python, "-m", "venv", str(folder))


def torchrun(env: Path, script: Path, ranks: int, port: int) -> Argv:
    """Bare torchrun on one node."""
    return (
        *(str(env / "bin" / "torchrun"), "--nnodes", "1", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(port), str(script)),
    )


def handout(script: Path, nodes: int, ranks: int) -> Argv:
    """The lab handout's launcher; its archives are named by variables."""
    return ("bash", str(script), str(nodes), str(ranks))
