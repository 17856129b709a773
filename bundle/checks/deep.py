"""Complete verification of an environment: every byte is compared with the bundle it came from.

An environment holds all that it takes. Its directory is named after the digest of its manifest, the
manifest has the digests of the layers' heads, a head has the digest of every file. So nothing else
is needed, and damage to these records themselves is noticed, too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..environment import damage, hard_links
from ..environment.damage import RENEWED, Fault, interpreter_faults, shown
from ..environment.listing import STATE, Merged, merge, own_files
from ..environment.process_pool import share
from ..environment.unpack import hooks, lock_path, making, own_links, using, write_problem
from ..format.layer import Entry, LayerError, decode_head
from ..format.manifest import Manifest, ManifestError, Part, parse
from ..format.zstd import load_decompressor
from ..node import node_root, removal
from ..node.node_root import env_path
from ..protocol.counts import counted
from ..protocol.digest import Digest
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import digest_of, error_text, read_file

SHOWN = 20
"""Damaged files that are named, each with its fault; the others are counted."""

_GROUPS = 1024  # as many tasks as process_pool.share hands out one by one
_READ_ONLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def damaged_files(env_dir: str, processes: int) -> list[Problem]:
    """Compare every file, link and directory of a published environment with its own manifest.

    Each file is read in full, and its sha256, its size and its exec bit are compared. Files that do
    not belong there are reported, too. The environment cannot be removed meanwhile.

    Returns:
        Up to ``SHOWN`` damaged paths, then the number of the others; empty if there are none.

    Raises:
        NodeError: its lock cannot be taken, or the check itself failed.
    """
    root = os.path.dirname(os.path.dirname(env_dir))
    with using(root, os.path.basename(env_dir)):
        try:
            manifest = _manifest(env_dir)
            with making(root, manifest.id):  # else its scratch directory would be swept away
                merged = _expected_content(env_dir, manifest, os.path.join(root, "incoming"))
        except LayerError as exc:
            return [_damaged(env_dir, str(exc))]
        except OSError as exc:
            raise NodeError(write_problem(exc, root)) from exc
        files = [entry for entries in merged.entries for entry in entries]
        faults = {fault.path: fault for fault in _own_faults(env_dir, manifest)}
        for fault in _tree_faults(env_dir, manifest, merged):
            faults.setdefault(fault.path, fault)
        # Last: of a file that has become a link, the tree's fault is better worded.
        for fault in _content_faults(env_dir, files, processes):
            faults.setdefault(fault.path, fault)
    return _problems(env_dir, sorted(faults.values()))


def discard(root: str, bundle_id: str) -> bool:
    """Remove a damaged environment, so that the next unpack makes it anew.

    A damaged file that other environments share has been marked by :func:`damaged_files`, so that
    no other environment gets it, and each of them notices the damage when it is used next.

    Returns:
        True if there was one.

    Raises:
        NodeError: a job is using it, or it cannot be removed.
    """
    final = env_path(root, bundle_id)
    aside = os.path.join(root, "incoming", f"{bundle_id}.{time.monotonic_ns()}")
    try:
        with node_root.taken(lock_path(root, bundle_id), fcntl.LOCK_EX | fcntl.LOCK_NB):
            if not os.path.lexists(final):
                return False
            os.rename(final, aside)
            removal.delete(aside)
    except BlockingIOError as exc:
        raise NodeError(Problem(ProblemCode.DAMAGE_IN_USE, final)) from exc
    except OSError as exc:
        where = str(exc.filename or final)
        values = {"why": error_text(exc), "root": root}
        raise NodeError(Problem(ProblemCode.DAMAGE_NOT_REMOVED, where, values)) from exc
    return True


def _manifest(env_dir: str) -> Manifest:
    """Return the manifest; its digest must be the environment's name."""
    try:
        manifest = parse(read_file(os.path.join(env_dir, damage.MANIFEST)))
    except (OSError, ManifestError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise LayerError(f"its manifest cannot be read: {why}") from exc
    name = os.path.basename(env_dir)
    if manifest.id != name:
        raise LayerError(f"its manifest is that of bundle {manifest.id[:12]}, not of {name[:12]}")
    return manifest


def _expected_content(env_dir: str, manifest: Manifest, scratch: str) -> Merged:
    """Return the content that must be there, by the layer heads kept in the environment."""
    part = manifest.decompressor
    wheel = None if part is None else _decompressor_wheel(env_dir, part)
    heads = _heads(env_dir, manifest)
    with tempfile.TemporaryDirectory(prefix=f"{manifest.id}.", dir=scratch) as folder:
        decompress = load_decompressor(part.name if part else "", wheel, folder)
        indexes = [decode_head(head, lambda data: decompress(data, -1)) for head in heads]
    return merge(manifest.layers, indexes, manifest.requires.python)


def _decompressor_wheel(env_dir: str, part: Part) -> bytes:
    try:
        wheel = read_file(hard_links.decompressor_path(env_dir, part))
    except OSError as exc:
        raise LayerError(f"{part.name} cannot be read: {exc.strerror or exc}") from exc
    if Digest.of(wheel) != part.sha256:
        raise LayerError(f"{part.name} does not have the digest in the manifest")
    return wheel


def _heads(env_dir: str, manifest: Manifest) -> list[bytes]:
    heads: list[bytes] = []
    lost: list[str] = []
    for layer in manifest.layers:
        head = hard_links.head_of((env_dir,), layer)
        if head is None:
            lost.append(layer.name)
        else:
            heads.append(head)
    if lost:
        more = f" and {counted(len(lost) - 1, 'more layer')}" if lost[1:] else ""
        raise LayerError(f"the list of files is missing or damaged for {lost[0]}{more}")
    return heads


def _content_faults(env_dir: str, files: Sequence[Entry], processes: int) -> Iterator[Fault]:
    count = min(_GROUPS, len(files))
    largest_first = sorted(range(len(files)), key=lambda number: -files[number].size)
    # The children share this memory. A pipe would not do: nobody reads it before they have ended.
    with mmap.mmap(-1, len(files) + 1) as marks:

        def read_group(group: int) -> None:
            for number in largest_first[group::count]:
                if _difference(env_dir, files[number]):
                    marks[number] = 1

        share(count, read_group, processes)
        damaged = [entry for number, entry in enumerate(files) if marks[number]]
    for entry in damaged:
        _mark(f"{env_dir}/{entry.path}")
    for number, entry in enumerate(damaged):
        # Read again for the message, unless the file is only counted.
        why = _difference(env_dir, entry) if number < SHOWN else "it differs"
        yield Fault(entry.path, why or "read twice, it differed once: the disk is failing")


def _difference(env_dir: str, entry: Entry) -> str:
    try:
        handle = os.open(f"{env_dir}/{entry.path}", _READ_ONLY)
    except OSError as exc:
        if exc.errno == errno.ENOENT:
            return "it is missing"
        return f"it cannot be opened: {exc.strerror or exc}"
    try:
        return _state_difference(os.fstat(handle), entry) or _content_difference(handle, entry)
    except OSError as exc:
        return f"it cannot be read: {exc.strerror or exc}"
    finally:
        os.close(handle)


def _state_difference(state: os.stat_result, entry: Entry) -> str:
    if not stat.S_ISREG(state.st_mode):
        return "it is not a file any more"
    if state.st_size != entry.size:
        return f"it has {counted(state.st_size, 'byte')}, not {entry.size:,}"
    if state.st_mode & 0o100 != entry.mode & 0o100:
        return f"its mode is {stat.S_IMODE(state.st_mode):04o}, not {entry.mode:04o}"
    return ""


def _content_difference(handle: int, entry: Entry) -> str:
    digest = digest_of(handle)
    if digest == entry.sha256:
        return ""
    return f"its sha256 begins with {digest[:12]}, not with {entry.sha256[:12]}"


def _own_faults(env_dir: str, manifest: Manifest) -> Iterator[Fault]:
    python = os.path.join(env_dir, "bin", "python")
    if not os.access(python, os.X_OK):
        yield Fault("bin/python", "it leads to no program that can be run")
    for path, content in hooks(manifest.requires.python).items():
        entry = Entry(path, len(content), 0o644, Digest.of(content), 0)
        why = _difference(env_dir, entry)
        if why:
            yield Fault(path, why)
    yield from interpreter_faults(env_dir)
    fault = damage.own_fault(env_dir)
    if fault is not None:
        yield fault


def _tree_faults(env_dir: str, manifest: Manifest, merged: Merged) -> Iterator[Fault]:
    """Find paths that do not belong there, links that have changed, and missing links."""
    links = {**merged.links, **own_links(manifest.requires.python)}
    files = _expected_files(env_dir, manifest, merged)
    seen = set()
    for path, target in _listing(env_dir, merged.directories):
        seen.add(path)
        why = _path_fault(path, target, links, files)
        if why:
            yield Fault(path, why)
    for path in links.keys() - seen:
        yield Fault(path, f"it is missing; it must lead to {links[path]}")
    for path in merged.directories:
        if not os.path.isdir(os.path.join(env_dir, path)):
            yield Fault(path, "the directory is missing")


def _path_fault(path: str, target: str, links: Mapping[str, str], files: Collection[str]) -> str:
    if path in links:
        if target == links[path]:
            return ""
        return f"it leads to {target or 'nowhere'}, not to {links[path]}"
    if path not in files:
        return "it does not belong there"
    if target and path != "bin/python":
        return f"it is a symbolic link now, to {target}"
    return ""


def _expected_files(env_dir: str, manifest: Manifest, merged: Merged) -> set[str]:
    files = {entry.path for entries in merged.entries for entry in entries}
    files.update(own_files(manifest.requires.python))
    files.update(f"{STATE}/layers/{layer.id}" for layer in manifest.layers)
    if manifest.decompressor is not None:
        path = hard_links.decompressor_path(env_dir, manifest.decompressor)
        files.add(os.path.relpath(path, env_dir))
    return files


def _listing(env_dir: str, directories: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield paths outside the known directories, and link targets; an unknown directory once."""
    known = frozenset(directories)
    pending = [""]
    while pending:
        folder = pending.pop()
        for item in _items(os.path.join(env_dir, folder)):
            path = f"{folder}/{item.name}" if folder else item.name
            if item.is_symlink():
                try:
                    yield path, os.readlink(item.path)
                except FileNotFoundError:  # renamed: another job renews the interpreter
                    continue
            elif path in known and item.is_dir(follow_symlinks=False):
                pending.append(path)
            elif not RENEWED.fullmatch(path):
                yield path, ""


def _items(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except OSError:  # each file in it will be reported as missing, or unreadable
        return []


def _problems(env_dir: str, faults: Sequence[Fault]) -> list[Problem]:
    problems = []
    for fault in faults[:SHOWN]:
        where = os.path.join(env_dir, shown(fault.path))
        problems.append(_damaged(where, fault.why))
    if len(faults) > SHOWN:
        more = counted(len(faults) - SHOWN, "more path")
        why = f"{more} in it differ from what was built"
        problems.append(_damaged(env_dir, why))
    return problems


def _damaged(where: str, why: str) -> Problem:
    return Problem(ProblemCode.ENVIRONMENT_DAMAGED, where, {"why": why})


def _mark(path: str) -> None:
    """Mark a damaged file as just modified, in every environment that shares it."""
    with contextlib.suppress(OSError):  # it is missing, or no file: that is noticed without a mark
        handle = os.open(path, _READ_ONLY)
        try:
            hard_links.mark(handle)
        finally:
            os.close(handle)
