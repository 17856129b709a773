"""Comparison of a published environment with its listing, at each use, without reading its files.

A damaged file nearly always shows so: it is missing, a directory or a link, has another size, or
was written to after it was published (``ctime`` changes when a file is linked).
:mod:`bundle.checks.deep` finds the rest.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ..format.manifest import Manifest, ManifestError, parse
from ..protocol.counts import format_count
from ..protocol.problem import Problem, ProblemCode
from ..system.files import error_text, read_file
from . import listing as listings
from .listing import FOLDER, LINK, OWN, PATH, STATE, Folder, Listing
from .process_pool import run_tasks

# --- A fault of an environment: a path that is not as it was built -------------------------------


class Fault(NamedTuple):
    """One thing in an environment that is not as it was built."""

    path: str
    why: str
    layers: tuple[int, ...] | None = ()  # numbers of layers with a file there; None if unknown


def format_path(path: str) -> str:
    """Return a path as it may stand in a message."""
    return path if path.isprintable() else ascii(path)


def _describe_read_error(exc: Exception) -> str:
    is_missing = isinstance(exc, FileNotFoundError)
    return "it is missing" if is_missing else str(getattr(exc, "strerror", None) or exc)


# --- The link from an environment to its interpreter, and ``pyvenv.cfg``, which must agree with it

RENEWED = re.compile(r"(?:bin/python|pyvenv\.cfg)\.\d+-\d+")
"""Files that are renamed into place to point an environment at another interpreter."""
_RENEWAL_SECONDS = 0.05


def find_interpreter_faults(env_dir: str) -> list[Fault]:
    """Compare ``pyvenv.cfg`` with the link to the interpreter; another job may just change both."""
    if not _compare_interpreter_link(env_dir):
        return []
    time.sleep(_RENEWAL_SECONDS)
    return _compare_interpreter_link(env_dir)


def _compare_interpreter_link(env_dir: str) -> list[Fault]:
    try:
        target = os.readlink(os.path.join(env_dir, "bin", "python"))
    except OSError as exc:
        return [Fault("bin/python", f"it is missing or no link: {exc.strerror or exc}")]
    wanted = pyvenv_cfg(target)
    try:
        data = read_file(os.path.join(env_dir, "pyvenv.cfg"), len(wanted) + 1)
    except OSError as exc:
        return [Fault("pyvenv.cfg", _describe_read_error(exc))]
    if data != wanted:
        return [Fault("pyvenv.cfg", f"it does not say what it must for {target}")]
    return []


def pyvenv_cfg(python: str) -> bytes:
    """Return the content of ``pyvenv.cfg`` for an interpreter (PEP 405)."""
    return (
        f"home = {os.path.dirname(python)}\n"
        "include-system-site-packages = false\n"
        f"executable = {python}\n"
    ).encode("utf-8", "surrogateescape")


# --- Strays: paths in an environment that no listing has, as programs leave them -----------------

_UNGUARDED = ("project", "assets")  # directories in which programs may leave files of their own


def is_directory(path: str) -> bool:
    """Return True for a directory, but not for a link to one."""
    with suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode)
    return False


def find_strays(env_dir: str, other: str) -> list[str]:
    """Return the files that programs have left in an environment and that another copy lacks."""
    strays = []
    pending = list(_UNGUARDED)
    while pending:
        folder = pending.pop()
        names: list[str] = []
        with suppress(OSError):
            if is_directory(os.path.join(env_dir, folder)):
                names = os.listdir(os.path.join(env_dir, folder))
        for path in (f"{folder}/{name}" for name in names):
            counterpart = os.path.join(other, path)
            if not os.path.lexists(counterpart):
                strays.append(path)
            elif is_directory(counterpart):
                pending.append(path)
    return strays


_ALLOWED_STRAY = re.compile(
    rf"(.*/)?__pycache__(/[^/]*\.pyc[^/]*)?|({'|'.join(_UNGUARDED)})/.*|{RENEWED.pattern}",
    re.DOTALL,
)
"""What is harmless: bytecode of Python, and files of the user's."""


MANIFEST = f"{STATE}/manifest.json"
SHOWN = 3  # number of damaged paths that a message names; the others are counted

_REPLACED = ("another, older file is in its place", "it was written to after it was published")
_STRAY = -4  # the code of a name that is not listed
_RUN = 16  # directories that are compared as one task: some hundred microseconds of work
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def find_faults(env_dir: str, processes: int) -> list[Fault] | None:
    """Compare the environment at a path with its listing; return None if there is none."""
    if not os.path.lexists(env_dir):
        return None
    if not is_directory(env_dir):
        return [Fault(".", "it is not a directory")]
    return compare_with_listing(env_dir, processes)


def compare_with_listing(env_dir: str, processes: int) -> list[Fault]:
    """Return what is not as the listing of a published environment says, sorted by path."""
    try:
        listing = listings.read(env_dir)
    except listings.ListingError as exc:
        return [Fault(PATH, str(exc), None)]
    found = [*find_manifest_faults(env_dir), *find_interpreter_faults(env_dir)]
    lines = listing.folders
    # A byte for each directory, shared with the processes.
    with mmap.mmap(-1, len(lines) + 1) as marks:

        def work(run: int) -> None:
            start = run * _RUN
            folders = listings.parse_folders(lines[start : start + _RUN])
            for number, folder in enumerate(folders, start):
                if any(_compare_folder(env_dir, folder, listing)):
                    marks[number] = 1

        run_tasks(-(-len(lines) // _RUN), work, processes)
        marked = [line for line, mark in zip(lines, marks[:]) if mark]
    for folder in listings.parse_folders(marked):
        found += _compare_folder(env_dir, folder, listing)
    return sorted(found, key=lambda fault: (fault.path, fault.why))


def describe(env_dir: str, found: Sequence[Fault]) -> Problem:
    """Return the problem of an environment that will be repaired: paths, number, reasons."""
    named = [f"{format_path(fault.path)}: {fault.why}" for fault in found[:SHOWN]]
    named += [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    count = "1 path in it is" if len(found) == 1 else f"{len(found)} paths in it are"
    why = f"{count} not as published: {'; '.join(named)}"
    return Problem(ProblemCode.ENVIRONMENT_REPAIRED, env_dir, {"why": why})


def list_damaged_layers(manifest: Manifest, found: Sequence[Fault]) -> set[int]:
    """Return the numbers of the layers with a damaged file or a damaged head."""
    heads = {f"{STATE}/layers/{layer.id}": (i,) for i, layer in enumerate(manifest.layers)}
    every = tuple(range(len(manifest.layers)))
    damaged: set[int] = set()
    for fault in found:
        known = None if fault.path == f"{STATE}/layers" else fault.layers
        damaged.update(every if known is None else known, heads.get(fault.path, ()))
    return damaged


def find_manifest_faults(env_dir: str) -> list[Fault]:
    """Compare the manifest with the name of the directory, which is its digest."""
    try:
        bundle_id = parse(read_file(os.path.join(env_dir, MANIFEST))).id
    except (OSError, ManifestError) as exc:
        return [Fault(MANIFEST, _describe_read_error(exc), None)]
    if bundle_id != os.path.basename(env_dir):
        return [Fault(MANIFEST, f"it is that of bundle {bundle_id[:12]}", None)]
    return []


def _compare_folder(env_dir: str, folder: Folder, listing: Listing) -> Iterator[Fault]:
    missing = dict(folder.names)
    try:
        found = dict(_compare_names(f"{env_dir}/{folder.path}", folder, listing, missing))
    except OSError as exc:
        every = tuple(number for number, _ in folder.layers)
        why = f"the directory cannot be read: {error_text(exc)}"
        yield Fault(folder.path or ".", why, every)
        return
    found.update((name, "it is missing") for name, code in missing.items() if code != OWN)
    layers = folder.map_layers() if found else {}
    for name, why in found.items():
        yield Fault(os.path.join(folder.path, name), why, (layers[name],) if name in layers else ())


def _compare_names(
    path: str, folder: Folder, listing: Listing, missing: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield each name that is not as listed, and why; take those that are there off the missing."""
    window = folder.find_window(listing)
    own = window or listing.own
    layers = folder.map_layers() if window is None else {}
    with ExitStack() as opened:
        handle = os.open(path, _FOLDER)
        opened.callback(os.close, handle)
        for item in opened.enter_context(os.scandir(handle)):
            name = item.name
            code = missing.pop(name, _STRAY)
            if code < 0:
                why = _compare_other(item, handle, code, folder)
            else:
                first, last = listing.layers[layers[name]] if name in layers else own
                status = item.stat(follow_symlinks=False)
                mode = status.st_mode
                # In place: a call for each of tens of thousands of files would show.
                if (
                    status.st_size * 2 + (mode >> 6 & 1) == code
                    and first <= status.st_mtime_ns <= last
                    and mode & 0o170400 == 0o100400
                ):
                    continue
                why = _explain_file_fault(status, code, last)
            if why:
                yield name, why


def _compare_other(item: os.DirEntry[str], handle: int, code: int, folder: Folder) -> str:
    if code == LINK:
        target = folder.links.get(item.name)
        is_same = item.is_symlink() and os.readlink(item.name, dir_fd=handle) == target
        return "" if is_same else "it is not the symbolic link that it was"
    if code == FOLDER and not item.is_dir(follow_symlinks=False):
        return "it is not a directory any more"
    path = os.path.join(folder.path, item.name)
    is_wrong = code == _STRAY and not _ALLOWED_STRAY.fullmatch(path)
    return "it does not belong there" if is_wrong else ""


def _explain_file_fault(status: os.stat_result, code: int, last: int) -> str:
    return explain_status(status, *divmod(code, 2)) or _REPLACED[status.st_mtime_ns > last]


def explain_status(status: os.stat_result, size: int, executable: int) -> str:
    """Return how a file differs from one of a layer, as far as that shows; empty if it does not."""
    mode = status.st_mode
    if not stat.S_ISREG(mode):
        return "it is not a file any more"
    if status.st_size != size:
        return f"it has {format_count(status.st_size, 'byte')}, not {size:,}"
    if mode >> 6 & 1 != executable or not mode & stat.S_IRUSR:
        return f"its mode is {stat.S_IMODE(mode):04o}, not {'0755' if executable else '0644'}"
    return ""
