"""The compiled code of a job: earlier jobs' is sent to the nodes, and its own is brought back.

Nothing of it makes a job fail: what goes wrong is noted, and the ranks compile.
"""

from __future__ import annotations

import functools
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, cast

from ..launch.compiled_code import MOST_FILES, receive_code, select_code
from ..node.node_root import code_path
from ..protocol.counts import format_count, format_size
from ..protocol.digest import Digest, canonical_json
from ..protocol.enumerations import Allocation, PhaseName
from ..protocol.events import CompiledCode
from ..protocol.job import CodeStore, Job
from ..protocol.messages import CodeAmount, CollectRequest, LaunchAnswer, NodeRootFacts
from ..protocol.problem import NodeError
from ..results.stream import send_selection
from .code_store import (
    StoredCode,
    add_code,
    list_stored_code,
    make_scratch,
    mark_as_used,
    write_shipment,
)
from .findings import shorten_names
from .placement import make_scratch_dir, send_code
from .state import State

_CRASHES = tuple(
    -int(number)
    for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE)
)
"""Exit statuses of ranks that compiled code may have ended."""
_MOST_PATHS = 64  # of a kind of node, in each node's request
_ROOM_FACTOR = 3  # as it comes, unpacked, and for the job


def list_known_paths(job: Job) -> dict[str, tuple[str, ...]] | None:
    """Return the paths by which a node of each kind sees what it lacks; None if none is used."""
    if job.code_store is None:
        return None
    return {
        kind: tuple(path for code in reversed(stored) for path in code.paths)[:_MOST_PATHS]
        for kind, stored in _list_by_kind(job).items()
    }


def _list_by_kind(job: Job) -> dict[str, list[StoredCode]]:
    """Return what earlier jobs have compiled for the job's software, by the kind of node."""
    found: dict[str, list[StoredCode]] = defaultdict(list)
    if job.code_store is not None:
        for code in list_stored_code(job.code_store.path, job.code_store.software):
            found[code.kind].append(code)
    return found


class JobCode:
    """The compiled code of one job."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._stored = _list_by_kind(state.job)
        self._sent: list[str] = []
        self._has_told = False
        self.starts_cold = False
        """True after a crash: further attempts compile anew."""

    def send(self) -> None:
        """Send the code for each kind of node to those that lack some."""
        if self.starts_cold:
            return
        if self._stored:
            self._warn_of_compilers()
        for kind, nodes in self._group_nodes().items():
            if stored := self._stored.get(kind):
                facts = {node: self._state.facts[node].code for node in nodes}
                lacking = tuple(node for node, one in facts.items() if one and not one.has_all)
                with self._note_failure(f"compiled code was not sent to {shorten_names(lacking)}"):
                    self._send_to(kind, stored, lacking)
        self._has_told = True

    def _send_to(self, kind: str, stored: Sequence[StoredCode], lacking: tuple[str, ...]) -> None:
        state = self._state
        mark_as_used(stored)
        used = f"compiled code of {_describe_stored(stored)} is used"
        if not lacking:
            if not self._has_told:
                state.note(used)
            return
        state.note(f"{used}, and sent to {shorten_names(lacking)}")
        self._refuse_small_disks(lacking, _ROOM_FACTOR * sum(code.bytes for code in stored))
        with make_scratch_dir() as folder:
            path = os.path.join(folder, "code")
            for why in write_shipment(stored, path):
                state.note(f"not all compiled code is used: {why}", warning=True)
            if state.job.allocation is Allocation.LOCAL:
                failed = self._place_here(path, kind, lacking)
            else:
                failed = send_code(state, path, kind, lacking)
        self._note_sent([node for node in lacking if node not in failed])
        for node, why in failed.items():
            raise ValueError(f"{node}: {why}")

    def _refuse_small_disks(self, nodes: Sequence[str], size: int) -> None:
        for node in nodes:
            host = self._state.facts[node].host
            place = host.node_root if host else None
            if isinstance(place, NodeRootFacts) and place.free_bytes < size:
                raise ValueError(f"{node} has room for {format_size(place.free_bytes)} only")

    def _note_sent(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            facts = self._state.facts[node]
            if facts.code is not None:
                self._sent.append(node)
                self._state.facts[node] = replace(facts, code=replace(facts.code, has_all=True))

    def _place_here(self, path: str, kind: str, nodes: Sequence[str]) -> dict[str, str]:
        for node in nodes:
            target = code_path(self._state.facts[node].root, kind)
            with open(path, "rb") as stream:
                receive_code(stream, f"{target}.new-{self._state.job.id}", target, node)
        return {}

    def choose_directory(self, node: str) -> str:
        """Return the name of a node's directory for compiled code; empty for none of ours."""
        facts = self._state.facts[node].code
        if facts is None:
            return ""
        return f"{facts.kind}.{self._state.job.id}" if self.starts_cold else facts.kind

    def look_for_crashes(self) -> None:
        """Let further attempts compile anew where a rank was ended as by its compiled code."""
        answers = self._state.get_answers(LaunchAnswer).values()
        records = [record for answer in answers for record in answer.failures]
        if not any(record.exit_code in _CRASHES for record in records):
            return
        if not self.starts_cold and any(map(self._stored.get, self._group_nodes())):
            self._state.note(
                "a rank crashed that had compiled code of earlier jobs: another attempt compiles "
                'anew, and with launch.compile-cache = "off" no such code is used',
                warning=True,
            )
        self.starts_cold = True

    def prepare_return(self, first_step: float | None) -> Callable[[], None]:
        """Return a function that keeps what the ranks have compiled, for the end of the job."""
        answers = self._state.get_answers(LaunchAnswer)
        amounts = {node: one.code for node, one in answers.items() if one.code is not None}
        return functools.partial(self._bring_back, amounts, first_step)

    def _bring_back(self, amounts: Mapping[str, CodeAmount], first_step: float | None) -> None:
        """Keep what the ranks have compiled, from one node of each kind; report what it gave."""
        store = self._state.job.code_store
        if store is None or self.starts_cold:
            return
        for kind, nodes in self._group_nodes().items():
            added: StoredCode | None = None
            if store.limit and os.path.isdir(os.path.dirname(store.path)):
                with self._note_failure("what the ranks have compiled was not kept"):
                    own = {node: amounts[node] for node in nodes if node in amounts}
                    added = self._keep_new(store, kind, own, first_step)
            self._report(kind, nodes, added, first_step)

    def _keep_new(
        self,
        store: CodeStore,
        kind: str,
        amounts: Mapping[str, CodeAmount],
        first_step: float | None,
    ) -> StoredCode | None:
        """Keep the files of the node that has most new ones; all of one where nothing is kept."""
        state, is_first = self._state, not self._stored.get(kind)
        sizes = {
            node: (one.total, one.total_bytes) if is_first else (one.new, one.new_bytes)
            for node, one in amounts.items()
        }
        node = max(sizes, key=lambda node: sizes[node], default="")
        facts = state.facts[node].code if node else None
        if facts is None or not sizes[node][1]:
            return None
        files, size = sizes[node]
        if files > MOST_FILES or size > store.limit:
            found = f"{format_count(files, 'file')}, {format_size(size)}"
            raise ValueError(f"{node} has more than the limit ({found})")
        amount = amounts[node]
        code = StoredCode(
            kind=kind,
            machine=facts.machine,
            software=store.software,
            job_id=state.job.id,
            bundle_id=state.job.bundle_id,
            command=_compute_command_digest(state),
            first_step=first_step if is_first and amount.new == amount.total else None,
        )
        with make_scratch(store.path) as scratch:
            folder = os.path.join(scratch, "code")
            self._fetch(node, scratch, folder, 0.0 if is_first else amount.begun)
            return add_code(store.path, folder, code, store.limit)

    def _fetch(self, node: str, scratch: str, folder: str, since: float) -> None:
        state, limit = self._state, 2 * cast("CodeStore", self._state.job.code_store).limit
        name, received = self.choose_directory(node), os.path.join(scratch, "received")

        def take(stream: IO[bytes]) -> None:
            receive_code(cast("IO[bytes]", _Bounded(stream, limit)), received, folder, node)

        if state.job.allocation is Allocation.LOCAL:
            source, path = code_path(state.facts[node].root, name), os.path.join(scratch, "stream")
            with open(path, "w+b") as file:
                send_selection(select_code(source, since), source, file)
                file.seek(0)
                take(file)
            return
        request = CollectRequest(**state.place(node), directory="", code=name, since=since)
        state.transport.fetch(PhaseName.COLLECT, {node: request}, take)

    def _report(
        self,
        kind: str,
        nodes: Sequence[str],
        added: StoredCode | None,
        first_step: float | None,
    ) -> None:
        used, new = self._stored.get(kind, []), [added] if added else []
        if not (used or new):
            return
        (used_bytes, used_kernels), (new_bytes, new_kernels) = _sum_up(used), _sum_up(new)
        command = _compute_command_digest(self._state)
        before = [code.first_step for code in used if code.command == command]
        self._state.emit(
            CompiledCode(
                kind=kind,
                used_bytes=used_bytes,
                used_kernels=used_kernels,
                used_from=tuple(dict.fromkeys(code.job_id for code in used)),
                sent_to=tuple(filter(nodes.__contains__, self._sent)),
                new_bytes=new_bytes,
                new_kernels=new_kernels,
                first_step=first_step,
                first_step_before=next(filter(None, before), None),
            )
        )

    def _group_nodes(self) -> dict[str, list[str]]:
        """Return the nodes of each kind, spare ones too."""
        groups: dict[str, list[str]] = defaultdict(list)
        for node in (*self._state.job.nodes, *self._state.spares):
            facts = self._state.facts.get(node)
            if facts is not None and facts.code is not None:
                groups[facts.code.kind].append(node)
        return groups

    def _warn_of_compilers(self) -> None:
        """Warn where jobs compile for CPUs, and a node cannot.

        PyTorch looks for a compiler even where all code is there (InvalidCxxCompiler, torch 2.13).
        """
        without = [
            node
            for node, one in self._state.facts.items()
            if one.code and not one.code.compiler and not one.gpus
        ]
        if without and not self._has_told:
            self._state.note(
                f"{shorten_names(without)}: there is no C++ compiler (g++ or clang++), and earlier "
                "jobs have compiled with torch.compile, which needs one on CPUs",
                warning=True,
            )

    @contextmanager
    def _note_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except (NodeError, OSError, ValueError) as exc:
            self._state.note(f"{what}: {exc}", warning=True)


class _Bounded:
    """A stream of at most so many bytes: the numbers of a node's answer are its own."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._read, self._left = getattr(stream, "read1", stream.read), limit + (1 << 20)

    def read(self, size: int) -> bytes:
        data: bytes = self._read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("it is more than launch.compile-cache-limit")
        return data


def _describe_stored(stored: Sequence[StoredCode]) -> str:
    jobs = list(dict.fromkeys(code.job_id for code in stored))
    size, kernels = _sum_up(stored)
    noun = "job" if len(jobs) == 1 else "jobs"
    what = f"{format_size(size)}, {format_count(kernels, 'kernel')}"
    return f"{noun} {shorten_names(jobs)} ({what})"


def _sum_up(stored: Sequence[StoredCode]) -> tuple[int, int]:
    """Return the bytes and the kernels of all of it."""
    return sum(code.bytes for code in stored), sum(code.kernels for code in stored)


def _compute_command_digest(state: State) -> str:
    return Digest.of(canonical_json([state.job.name, *state.job.launch.command]))
