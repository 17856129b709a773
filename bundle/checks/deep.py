"""Complete verification of an environment: every byte is compared with the bundle it came from.

Its directory is named after the digest of its manifest, the manifest has the digests of the layers'
heads, a head that of every file: damage to these is noticed, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ..channel.agent_channel import AgentChannel
from ..environment import damage, hard_links, listing, unpack
from ..environment.damage import RENEWED, Fault, find_interpreter_faults, format_path
from ..environment.listing import STATE, Merged, merge, own_files
from ..environment.process_pool import run_tasks
from ..format.layer import Entry, LayerError, decode_head
from ..format.manifest import Manifest, parse
from ..format.zstd import load_decompressor
from ..node import machine, node_root, removal
from ..node.node_root import env_path
from ..protocol.counts import format_count
from ..protocol.digest import Digest
from ..protocol.messages import DeepAnswer, DeepRequest, NetworkReport, NodeClock
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import network
from ..system.files import compute_digest, error_text, read_file

# --- The network as one node sees it: the addresses of names, and reaching the head node ---------

# The answers of all nodes are compared in :mod:`bundle.driver.findings`.

_LOOKUPS = 16  # at a time: a name server that does not answer takes seconds for each
_PATIENCE = 2.0  # seconds that the head waits for one peer's line; a peer sends it at once
_PAUSE = 0.2
_LINE = 512


def resolve_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Look up the addresses of each name on this machine; an empty list for an unknown name."""

    def resolve(name: str) -> list[str]:
        with contextlib.suppress(NodeError):
            return network.resolve(name)
        return []

    distinct = list(dict.fromkeys(names))
    with ThreadPoolExecutor(max_workers=min(_LOOKUPS, len(distinct) or 1)) as pool:
        return dict(zip(distinct, pool.map(resolve, distinct)))


def wait_for_nodes(
    address: str, port: int, job_id: str, nodes: Collection[str], timeout: float
) -> list[str]:
    """Listen on the head node until every other node has connected; return those that did not."""
    until = time.monotonic() + timeout
    missing = dict.fromkeys(nodes)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=len(nodes) + 16)
    except OSError as exc:
        values = {"why": error_text(exc)}
        problem = Problem(ProblemCode.HEAD_PORT_TAKEN, f"{address}:{port}", values)
        raise NodeError(problem) from exc
    with listener:
        while missing and (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(OSError):  # the peer hung up, or nobody connected
                peer, _ = listener.accept()
                with peer:
                    missing.pop(_read_node_name(peer, job_id, min(left, _PATIENCE)), None)
    return list(missing)


def connect_to_head(address: str, port: int, job_id: str, node: str, timeout: float) -> float:
    """Connect to the head, which may begin to listen later; return the seconds that it took."""
    where, until = f"{address}:{port}", time.monotonic() + timeout
    while True:
        left = max(until - time.monotonic(), 0.01)
        seconds = -1.0
        try:
            started = time.monotonic()
            with socket.create_connection((address, port), timeout=left) as peer:
                seconds = time.monotonic() - started
                peer.sendall(f"stager {job_id} {node}\n".encode())
                if reply := _read_line(peer):
                    break
            # The head hangs up on a peer whose line is late: this node may have stood still.
            raise ConnectionError("it hung up")
        except OSError as exc:
            if time.monotonic() + _PAUSE >= until:
                raise NodeError(_make_unreached_problem(where, exc, seconds, timeout)) from exc
        time.sleep(_PAUSE)
    if reply == f"stager {job_id}":
        return seconds
    values = {"host": socket.gethostname(), "answer": repr(reply[:40])}
    raise NodeError(Problem(ProblemCode.HEAD_IS_ANOTHER, where, values))


def _read_node_name(peer: socket.socket, job_id: str, patience: float) -> str:
    """Return the name of the connected node; empty for a peer that does not name the job."""
    peer.settimeout(patience)
    words = _read_line(peer).split(" ", 2)
    peer.sendall(f"stager {job_id}\n".encode())
    # It hangs up first, so that its side and not this port waits out TIME_WAIT.
    with contextlib.suppress(OSError):
        peer.recv(1)
    return words[2] if len(words) == 3 and words[:2] == ["stager", job_id] else ""


def _read_line(peer: socket.socket) -> str:
    data = more = peer.recv(_LINE)
    while more and not data.endswith(b"\n") and len(data) < _LINE:
        more = peer.recv(_LINE)
        data += more
    return data.decode(errors="replace").rstrip("\n")


def _make_unreached_problem(where: str, exc: OSError, connected: float, timeout: float) -> Problem:
    code = ProblemCode.HEAD_UNREACHED
    if connected >= 0:
        code = ProblemCode.HEAD_MUTE
    elif isinstance(exc, ConnectionRefusedError):
        code = ProblemCode.HEAD_REFUSES
    elif isinstance(exc, socket.timeout):
        code = ProblemCode.HEAD_SILENT
    values = {"host": socket.gethostname(), "seconds": f"{timeout:g}", "why": error_text(exc)}
    return Problem(code, where, values)


SHOWN = 20  # damaged files that are named, each with its fault; the others are counted

_GROUPS = 1024  # as many tasks as process_pool hands out one by one


def find_damaged_files(env_dir: str, processes: int) -> list[Problem]:
    """Compare every byte, link and directory of a published environment with its own manifest."""
    root = os.path.dirname(os.path.dirname(env_dir))
    with unpack.hold_during(root, os.path.basename(env_dir)):
        try:
            if faults := damage.find_manifest_faults(env_dir):
                return [_make_damage_problem(env_dir, f"its manifest: {faults[0].why}")]
            manifest = parse(read_file(os.path.join(env_dir, damage.MANIFEST)))
            # Without this lock its scratch directory would be swept away.
            with unpack.turn_into_problem(root), unpack.lock_for_making(root, manifest.id):
                merged = _read_expected_content(env_dir, manifest, os.path.join(root, "incoming"))
        except LayerError as exc:
            return [_make_damage_problem(env_dir, str(exc))]
        files = [entry for entries in merged.entries for entry in entries]
        faults = [
            *_find_own_faults(env_dir, manifest),
            *_find_tree_faults(env_dir, manifest, merged),
            # Last: of a file that has become a link, the tree's fault is better worded.
            *_find_content_faults(env_dir, files, processes),
        ]
    found = sorted({fault.path: fault for fault in reversed(faults)}.values())
    problems = [
        _make_damage_problem(os.path.join(env_dir, format_path(fault.path)), fault.why)
        for fault in found[:SHOWN]
    ]
    if len(found) > SHOWN:
        more = format_count(len(found) - SHOWN, "more path")
        problems.append(_make_damage_problem(env_dir, f"{more} in it differ from what was built"))
    return problems


def remove_damaged_environment(root: str, bundle_id: str) -> bool:
    """Remove a damaged environment: the next unpack makes it anew. False if there is none."""
    final = env_path(root, bundle_id)
    aside = os.path.join(root, "incoming", f"{bundle_id}.{time.monotonic_ns()}")
    try:
        with node_root.hold_lock(unpack.lock_path(root, bundle_id), fcntl.LOCK_EX | fcntl.LOCK_NB):
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


def _read_expected_content(env_dir: str, manifest: Manifest, scratch: str) -> Merged:
    part, wheel = manifest.decompressor, None
    if part is not None:
        wheel = hard_links.read_kept_file([env_dir], f"decompressor/{part.name}", part.sha256)
        if wheel is None:
            raise LayerError(f"{part.name} is missing, or does not have the digest in the manifest")
    heads = []
    for layer in manifest.layers:
        head = hard_links.read_kept_file([env_dir], f"layers/{layer.id}", layer.head)
        if head is None:
            raise LayerError(f"the list of files is missing or damaged for {layer.name}")
        heads.append(head)
    with tempfile.TemporaryDirectory(prefix=f"{manifest.id}.", dir=scratch) as folder:
        decompress = load_decompressor(part.name if part else "", wheel, folder)
        indexes = [decode_head(head, lambda data: decompress(data, -1)) for head in heads]
    return merge(manifest.layers, indexes, manifest.requires.python)


def _find_content_faults(env_dir: str, files: Sequence[Entry], processes: int) -> Iterator[Fault]:
    count = min(_GROUPS, len(files))
    largest_first = sorted(range(len(files)), key=lambda number: -files[number].size)
    # The children share this memory. A pipe would not do: nobody reads it before they have ended.
    with mmap.mmap(-1, len(files) + 1) as marks:

        def read_group(group: int) -> None:
            for number in largest_first[group::count]:
                if _compare_file(env_dir, files[number]):
                    marks[number] = 1

        run_tasks(count, read_group, processes)
        damaged = [entry for number, entry in enumerate(files) if marks[number]]
    for entry in damaged:
        # One that is missing, or no file, is noticed without a mark.
        with contextlib.suppress(OSError), _open_to_read(f"{env_dir}/{entry.path}") as handle:
            hard_links.mark_as_damaged(handle)
    for number, entry in enumerate(damaged):
        # Read again for the message, unless the file is only counted.
        why = _compare_file(env_dir, entry) if number < SHOWN else "it differs"
        yield Fault(entry.path, why or "read twice, it differed once: the disk is failing")


def _compare_file(env_dir: str, entry: Entry) -> str:
    try:
        with _open_to_read(f"{env_dir}/{entry.path}") as handle:
            if why := damage.explain_status(os.fstat(handle), entry.size, entry.mode >> 6 & 1):
                return why
            digest = compute_digest(handle)
    except FileNotFoundError:
        return "it is missing"
    except OSError as exc:
        return f"it cannot be read: {exc.strerror or exc}"
    is_same = digest == entry.sha256
    return "" if is_same else f"its sha256 begins with {digest[:12]}, not with {entry.sha256[:12]}"


def _open_to_read(path: str) -> contextlib.AbstractContextManager[int]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return node_root.close_after(os.open(path, flags))


def _find_own_faults(env_dir: str, manifest: Manifest) -> Iterator[Fault]:
    yield from find_interpreter_faults(env_dir)  # first: it says whether the link is missing
    python = os.path.join(env_dir, "bin", "python")
    if not os.access(python, os.X_OK):
        yield Fault("bin/python", "it leads to no program that can be run")
    for path, content in unpack.list_hook_files(manifest.requires.python).items():
        entry = Entry(path, len(content), 0o644, Digest.of(content), 0)
        if why := _compare_file(env_dir, entry):
            yield Fault(path, why)
    try:
        listing.read(env_dir)
    except listing.ListingError as exc:
        yield Fault(listing.PATH, str(exc))


def _find_tree_faults(env_dir: str, manifest: Manifest, merged: Merged) -> Iterator[Fault]:
    links = {**merged.links, **listing.own_links(manifest.requires.python)}
    files = {entry.path for entries in merged.entries for entry in entries}
    files.update(own_files(manifest.requires.python), links)
    files.update(f"{STATE}/layers/{layer.id}" for layer in manifest.layers)
    if manifest.decompressor is not None:
        files.add(f"{STATE}/decompressor/{manifest.decompressor.name}")
    missing = dict(links)
    for path, target in _walk_environment(env_dir, merged.directories):
        if why := _check_path(path, target, missing.pop(path, ""), files):
            yield Fault(path, why)
    for path, wanted in missing.items():
        yield Fault(path, f"it is missing; it must lead to {wanted}")
    for path in merged.directories:
        if not os.path.isdir(os.path.join(env_dir, path)):
            yield Fault(path, "the directory is missing")


def _check_path(path: str, target: str, wanted: str, expected: Collection[str]) -> str:
    if wanted:
        return "" if target == wanted else f"it leads to {target or 'nowhere'}, not to {wanted}"
    if path not in expected:
        return "it does not belong there"
    if target and path != "bin/python":
        return f"it is a symbolic link now, to {target}"
    return ""


def _walk_environment(env_dir: str, directories: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield paths outside the known directories, and link targets; an unknown directory once."""
    known = frozenset(directories)
    pending = [""]
    while pending:
        folder, items = pending.pop(), list[os.DirEntry[str]]()
        # Each file in one that cannot be read will be reported as missing, or unreadable.
        with contextlib.suppress(OSError), os.scandir(os.path.join(env_dir, folder)) as entries:
            items = list(entries)
        for item in items:
            path = f"{folder}/{item.name}" if folder else item.name
            if item.is_symlink():
                # A link may be renamed: another job renews the interpreter.
                with contextlib.suppress(FileNotFoundError):
                    yield path, os.readlink(item.path)
            elif path in known and item.is_dir(follow_symlinks=False):
                pending.append(path)
            elif not RENEWED.fullmatch(path):
                yield path, ""


def _make_damage_problem(where: str, why: str) -> Problem:
    return Problem(ProblemCode.ENVIRONMENT_DAMAGED, where, {"why": why})


# --- One node's part in ``verify --deep``: its clock, reaching the head, the names, every file

# Faults are reported in the answer: only the answers of all nodes tell which one is at fault
# (:mod:`bundle.driver.findings`), and a fault of one node must not end the check of another.

REACH_SECONDS = 20.0  # to listen, or try: a step's tasks do not start all at once


def check_deeply(request: DeepRequest, channel: AgentChannel) -> DeepAnswer:
    """Check this node thoroughly; its clock is sent first."""
    channel.emit(NodeClock(clock=time.time()))
    path = env_path(request.root, request.job.bundle_id)
    return DeepAnswer(
        network=None if request.head is None else _check_network(request, *request.head),
        torch=os.path.isdir(os.path.join(path, "pkgs", "torch", "distributed")),
        damage=tuple(_find_damage(request, path)),
    )


def _check_network(request: DeepRequest, address: str, port: int) -> NetworkReport:
    missing, seconds, problem = None, None, None
    job, others = request.job, request.job.nodes[1:]
    try:
        if request.node == job.nodes[0]:
            missing = tuple(wait_for_nodes(address, port, job.id, others, REACH_SECONDS))
        else:
            took = connect_to_head(address, port, job.id, request.node, REACH_SECONDS)
            seconds = round(took, 6)
    except NodeError as exc:
        problem = exc.problem
    expected = request.names or {}  # by the driver
    addresses = {name: tuple(found) for name, found in resolve_names(expected).items()}
    different = {name: found for name, found in addresses.items() if found != expected[name]}
    return NetworkReport(different, missing, seconds, problem)


def _find_damage(request: DeepRequest, path: str) -> list[Problem]:
    problems: list[Problem] = []
    cpus = machine.host_facts().cpus // request.nodes_here
    try:
        problems += find_damaged_files(path, max(1, cpus))
        if problems:
            remove_damaged_environment(request.root, request.job.bundle_id)
    except NodeError as exc:
        return [*problems, exc.problem]
    return [replace(problem, code=ProblemCode.ENVIRONMENT_TAKEN_AWAY) for problem in problems]
