"""Reading an environment again: whether every byte of it is still what was built.

The environment tells by itself what it must be. Its directory is named after the digest of its
manifest, the manifest has the digests of the layers' heads, a head has the digest of every file.
So nothing is needed besides, and no damage to what is kept here goes unnoticed.
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
from collections.abc import Collection, Iterator, Sequence

from ..environment import damage, hard_links
from ..environment.damage import Fault, interpreter_faults
from ..environment.layer_writer import write_problem
from ..environment.merge import STATE, Merged, merge, own_files
from ..environment.process_pool import share
from ..environment.unpack import env_path, lock_path, making, using
from ..environment.virtual_environment import hooks, own_links
from ..format.decompressor import load_decompressor
from ..format.layer import Entry, LayerError, decode_head
from ..format.manifest import Manifest, ManifestError, parse
from ..node import locks, removal
from ..protocol.counts import counted
from ..protocol.digest import Digest
from ..protocol.problem import NodeError, Problem
from ..system.files import digest_of, read_file

SHOWN = 20
"""Damaged files that are named, each with what is wrong; the others are counted."""
REMEDY = "remove it with `stager clean --nodes`, then stage it again"

_GROUPS = 1024  # as many tasks as pool.share hands out one by one


def damaged_files(env_dir: str, processes: int) -> list[Problem]:
    """Compare every file, link and directory of a published environment with its own manifest.

    Each file is read whole, and its sha256, its size and its exec bit are compared. What lies
    there besides is found, too. The environment is kept from being removed meanwhile.

    Args:
        env_dir: the environment, ``<node root>/envs/<bundle id>``.
        processes: how many processes read.

    Returns:
        What is damaged: up to ``SHOWN`` paths, then how many more; empty where all is well.

    Raises:
        NodeError: its lock cannot be taken, or the checking itself failed.
    """
    root = os.path.dirname(os.path.dirname(env_dir))
    with using(root, os.path.basename(env_dir)):
        try:
            manifest = _manifest(env_dir)
            with making(root, manifest.id):  # else its scratch would be swept away
                merged = _merged(env_dir, manifest, os.path.join(root, "incoming"))
        except LayerError as exc:
            return [Problem(damage.DAMAGED, env_dir, str(exc), REMEDY)]
        except OSError as exc:
            raise NodeError(write_problem(exc, root)) from exc
        files = [entry for entries in merged.entries for entry in entries]
        faults = {fault.path: fault for fault in _own(env_dir, manifest)}
        for fault in _unlisted(env_dir, manifest, merged):
            faults.setdefault(fault.path, fault)
        # Last, for a file that is a link now was found to be one already, in better words.
        for fault in _changed(env_dir, files, processes):
            faults.setdefault(fault.path, fault)
    return _worded(env_dir, sorted(faults.values()))


def discard(root: str, bundle_id: str) -> bool:
    """Take a damaged environment out of service, so that the next unpack makes it anew.

    A damaged file that other environments share has been marked by :func:`damaged_files`, so that
    it is given to none any more, and each of them notices when it is used next.

    Args:
        root: the node root.
        bundle_id: which environment.

    Returns:
        Whether there was one.

    Raises:
        NodeError: a job is using it, or it cannot be removed.
    """
    final = env_path(root, bundle_id)
    aside = os.path.join(root, "incoming", f"{bundle_id}.{time.monotonic_ns()}")
    try:
        with locks.taken(lock_path(root, bundle_id), fcntl.LOCK_EX | fcntl.LOCK_NB):
            if not os.path.lexists(final):
                return False
            os.rename(final, aside)
            removal.delete(aside)
    except BlockingIOError as exc:
        what, why = "the damaged environment cannot be removed", "a job on this node is using it"
        fix = "wait until that job has ended, or end it, and stage again"
        raise NodeError(Problem(what, final, why, fix)) from exc
    except OSError as exc:
        what = "the damaged environment cannot be removed"
        why = getattr(exc, "strerror", None) or str(exc)
        where = str(getattr(exc, "filename", None) or final)
        raise NodeError(Problem(what, where, why, f"remove {root} there by hand")) from exc
    return True


def _manifest(env_dir: str) -> Manifest:
    """The manifest that the environment's name stands for.

    Raises:
        LayerError: it is missing, damaged, or another one.
    """
    try:
        manifest = parse(read_file(os.path.join(env_dir, damage.MANIFEST)))
    except (OSError, ManifestError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise LayerError(f"its manifest cannot be read: {why}") from exc
    name = os.path.basename(env_dir)
    if manifest.id != name:
        raise LayerError(f"its manifest is that of bundle {manifest.id[:12]}, not of {name[:12]}")
    return manifest


def _merged(env_dir: str, manifest: Manifest, scratch: str) -> Merged:
    """What must be there, from the heads that the environment keeps.

    Raises:
        LayerError: one of them, or the decompressor, is not what the manifest promises.
        NodeError: the decompressor does not load.
    """
    part, wheel = manifest.decompressor, None
    if part is not None:
        try:
            wheel = read_file(hard_links.decompressor_path(env_dir, part))
        except OSError as exc:
            raise LayerError(f"{part.name} cannot be read: {exc.strerror or exc}") from exc
        if Digest.of(wheel) != part.sha256:
            raise LayerError(f"{part.name} does not have the digest in the manifest")
    heads = [hard_links.head_of((env_dir,), layer) for layer in manifest.layers]
    lost = [layer.name for layer, head in zip(manifest.layers, heads) if head is None]
    if lost:
        more = f" and {counted(len(lost) - 1, 'more layer')}" if lost[1:] else ""
        raise LayerError(f"the list of files is missing or damaged for {lost[0]}{more}")
    with tempfile.TemporaryDirectory(prefix=f"{manifest.id}.", dir=scratch) as folder:
        decompress = load_decompressor(part.name if part else "", wheel, folder)
        indexes = [decode_head(head, lambda data: decompress(data, -1)) for head in heads if head]
    return merge(manifest.layers, indexes, manifest.requires.python)


def _changed(env_dir: str, files: Sequence[Entry], processes: int) -> Iterator[Fault]:
    """Files whose content is not what it must be; each is read whole."""
    count = min(_GROUPS, len(files))
    order = sorted(range(len(files)), key=lambda number: -files[number].size)
    # The children share this memory. A pipe would not do: nobody reads it before they have ended.
    with mmap.mmap(-1, len(files) + 1) as marks:

        def work(group: int) -> None:
            for number in order[group::count]:
                if _difference(env_dir, files[number]):
                    marks[number] = 1

        share(count, work, processes)
        bad = [entry for number, entry in enumerate(files) if marks[number]]
    for entry in bad:
        _mark(f"{env_dir}/{entry.path}")
    for number, entry in enumerate(bad):
        # Read again for the words, unless it is only counted.
        again = _difference(env_dir, entry) if number < SHOWN else "it differs"
        yield Fault(entry.path, again or "read twice, it differed once: the disk is failing")


def _difference(env_dir: str, entry: Entry) -> str:
    """What is wrong with a file; empty where nothing is."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(f"{env_dir}/{entry.path}", flags)
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


def _state_difference(found: os.stat_result, entry: Entry) -> str:
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file any more"
    if found.st_size != entry.size:
        return f"it has {counted(found.st_size, 'byte')}, not {entry.size:,}"
    if found.st_mode & 0o100 != entry.mode & 0o100:
        return f"its mode is {stat.S_IMODE(found.st_mode):04o}, not {entry.mode:04o}"
    return ""


def _content_difference(handle: int, entry: Entry) -> str:
    digest = digest_of(handle)
    if digest == entry.sha256:
        return ""
    return f"its sha256 begins with {digest[:12]}, not with {entry.sha256[:12]}"


def _own(env_dir: str, manifest: Manifest) -> Iterator[Fault]:
    """Faults of the files that make a virtual environment of the tree, see ``venv``."""
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


def _unlisted(env_dir: str, manifest: Manifest, merged: Merged) -> Iterator[Fault]:
    """Whatever is there and was not built, links that lead elsewhere, and missing links."""
    python = manifest.requires.python
    links = {**merged.links, **own_links(python)}
    files = {entry.path for entries in merged.entries for entry in entries}
    files |= {*own_files(python), *(f"{STATE}/layers/{layer.id}" for layer in manifest.layers)}
    if manifest.decompressor is not None:
        files.add(
            os.path.relpath(hard_links.decompressor_path(env_dir, manifest.decompressor), env_dir)
        )
    seen = set()
    for path, target in _listing(env_dir, merged.directories):
        seen.add(path)
        if path in links and target != links[path]:
            yield Fault(path, f"it leads to {target or 'nowhere'}, not to {links[path]}")
        elif path not in links and target and path in files and path != "bin/python":
            yield Fault(path, f"it is a symbolic link now, to {target}")
        elif path not in links and path not in files:
            yield Fault(path, "it does not belong there")
    for path in links.keys() - seen:
        yield Fault(path, f"it is missing; it must lead to {links[path]}")
    for path in merged.directories:
        if not os.path.isdir(os.path.join(env_dir, path)):
            yield Fault(path, "the directory is missing")


def _listing(env_dir: str, folders: Collection[str]) -> Iterator[tuple[str, str]]:
    """Every path but the known directories, with the target if it is a link.

    A directory that is not known comes as one path: what is in it does not matter.
    """
    known, waiting = frozenset(folders), [""]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(os.path.join(env_dir, here)) as listing:
                items = list(listing)
        except OSError:  # each file in it will be found missing, or unreadable
            continue
        for item in items:
            path = f"{here}/{item.name}" if here else item.name
            if item.is_symlink():
                try:
                    yield path, os.readlink(item.path)
                except FileNotFoundError:  # renamed: another job renews the interpreter
                    continue
            elif path in known and item.is_dir(follow_symlinks=False):
                waiting.append(path)
            elif not damage.RENEWED.fullmatch(path):
                yield path, ""


def _worded(env_dir: str, faults: Sequence[Fault]) -> list[Problem]:
    problems = []
    for fault in faults[:SHOWN]:
        where = os.path.join(env_dir, damage.shown(fault.path))
        problems.append(Problem(damage.DAMAGED, where, fault.why, REMEDY))
    if len(faults) > SHOWN:
        more = counted(len(faults) - SHOWN, "more path")
        why = f"{more} in it differ from what was built"
        problems.append(Problem(damage.DAMAGED, env_dir, why, REMEDY))
    return problems


def _mark(path: str) -> None:
    """Mark a damaged file as written to just now, in every environment that shares it."""
    with contextlib.suppress(OSError):  # it is missing, or no file: that shows without a mark
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            hard_links.mark(handle)
        finally:
            os.close(handle)
