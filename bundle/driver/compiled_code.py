"""The compiled code of a job: earlier jobs' is sent to the nodes, and its own is brought back.

Nothing of it makes a job fail: what goes wrong is noted, and the ranks compile.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO

from ..launch.compiled_code import MOST_FILES, make_code_dir, unpack_code
from ..launch.program_variables import CODE
from ..node.node_root import code_path
from ..protocol.counts import format_count, format_size
from ..protocol.digest import Digest, canonical_json
from ..protocol.enumerations import Allocation, PhaseName
from ..protocol.events import CompiledCode
from ..protocol.job import Job
from ..protocol.messages import CodeAmount, CollectRequest, LaunchAnswer
from ..protocol.problem import NodeError
from ..results.receive import receive_outputs
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
from .retries import Failure, RankProgress
from .state import State

_CRASHES = frozenset(
    (str(-int(number)),)
    for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE)
)
"""Places of failures by signals with which compiled code ends a process."""
_MOST_PATHS = 64  # of a kind of node, in each node's request


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
        for code in list_stored_code(job.code_store.path):
            if code.software == job.code_store.software:
                found[code.kind].append(code)
    return found


class JobCode:
    """The compiled code of one job."""

    def __init__(self, state: State) -> None:
        self._state, self._store = state, state.job.code_store
        self._stored: dict[str, list[StoredCode]] = {}
        self._sent: list[str] = []
        self._is_refused = False
        """True after a crash: further attempts compile anew."""

    def send(self) -> None:
        """Send the code for each kind of node to those that lack some."""
        self._stored = _list_by_kind(self._state.job)
        for kind, nodes in self._group_nodes().items():
            stored = self._stored.get(kind, ())
            facts = {node: self._state.facts[node].code for node in nodes}
            lacking = tuple(node for node, one in facts.items() if one and not one.has_all)
            if stored and not self._is_refused:
                self._warn_of_compilers(kind)
                with self._note_failure(f"compiled code was not sent to {shorten_names(lacking)}"):
                    self._send_to(kind, stored, lacking)

    def _send_to(self, kind: str, stored: Sequence[StoredCode], lacking: tuple[str, ...]) -> None:
        state = self._state
        what = _describe_stored(stored)
        state.note(
            f"compiled code of {what} is used"
            + (f", and sent to {shorten_names(lacking)}" if lacking else "")
        )
        mark_as_used(stored)
        if not lacking:
            return
        with make_scratch_dir() as folder:
            path = os.path.join(folder, "code")
            write_shipment(stored, path)
            if state.job.allocation is Allocation.LOCAL:
                for node in lacking:
                    target = make_code_dir(state.facts[node].root, kind)
                    unpack_code(path, f"{target}.new", target, node)
            else:
                send_code(state, path, kind, lacking)
        self._sent += lacking
        for node in lacking:
            facts = state.facts[node]
            if facts.code is not None:
                state.facts[node] = replace(facts, code=replace(facts.code, has_all=True))

    def choose_directory(self, node: str) -> str:
        """Return the name of a node's directory for compiled code; empty for none of ours."""
        facts = self._state.facts[node].code
        if facts is None:
            return ""
        return f"{facts.kind}.{self._state.job.id}" if self._is_refused else facts.kind

    def judge_failure(self, failure: Failure, progress: RankProgress) -> None:
        """Keep what the ranks of a failed attempt have compiled, unless it may have crashed one."""
        if failure.place[:1] not in _CRASHES:
            self.bring_back(progress)
        elif self._list_used() and not self._is_refused:
            self._is_refused = True
            self._state.note(
                "a rank crashed that had compiled code of earlier jobs: further attempts compile "
                'anew; with launch.compile-cache = "off" none is used',
                warning=True,
            )

    def bring_back(self, progress: RankProgress) -> None:
        """Keep what the ranks have compiled, from one node of each kind; report what it gave."""
        answers = self._state.get_answers(LaunchAnswer)
        if self._store is None or not answers:
            return
        first_step = progress.first_step_seconds
        for kind, nodes in self._group_nodes().items():
            amounts = {
                node: amount
                for node in nodes
                if node in answers and (amount := answers[node].code) is not None
            }
            added: StoredCode | None = None
            if self._store.limit and not self._is_refused:
                with self._note_failure("what the ranks have compiled was not kept"):
                    added = self._keep_new(kind, amounts, first_step)
            self._report(kind, nodes, added, first_step)

    def _keep_new(
        self, kind: str, amounts: Mapping[str, CodeAmount], first_step: float | None
    ) -> StoredCode | None:
        """Keep the files of the node that has most new ones; all of one where nothing is kept."""
        state, store = self._state, self._store
        is_first = not self._stored.get(kind)
        counts = {
            node: amount.total if is_first else amount.new for node, amount in amounts.items()
        }
        node = max(counts, key=lambda node: counts[node], default="")
        facts = state.facts[node].code if node else None
        if store is None or facts is None or not counts[node]:
            return None
        if state.transport.find_ending():
            return None
        amount = amounts[node]
        if counts[node] > MOST_FILES or amount.new_bytes > store.limit:
            size = f"{format_count(counts[node], 'file')}, {format_size(amount.new_bytes)}"
            raise ValueError(f"on {node} it is more than fits ({size})")
        code = StoredCode(
            kind=kind,
            machine=facts.machine,
            software=store.software,
            job_id=state.job.id,
            bundle_id=state.job.bundle_id,
            command=_compute_command_digest(state),
            first_step=first_step if is_first and amount.new == amount.total else None,
        )
        since = 0.0 if is_first else amount.begun
        if state.job.allocation is Allocation.LOCAL:
            folder = code_path(state.facts[node].root, kind)
            return add_code(store.path, folder, code, store.limit, since)
        with make_scratch(store.path) as folder:
            self._fetch(node, folder, since)
            return add_code(store.path, folder, code, store.limit)

    def _fetch(self, node: str, folder: str, since: float) -> None:
        def take(stream: IO[bytes]) -> None:
            received = receive_outputs(stream, folder, tuple(CODE.values()), node)
            if not received.complete:
                raise NodeError(received.problems[0])

        kind = self.choose_directory(node)
        request = CollectRequest(**self._state.place(node), directory="", code=kind, since=since)
        self._state.transport.fetch(PhaseName.COLLECT, {node: request}, take)

    def _report(
        self,
        kind: str,
        nodes: Sequence[str],
        added: StoredCode | None,
        first_step: float | None,
    ) -> None:
        used = [] if self._is_refused else self._stored.get(kind, [])
        if added is None and not used:
            return
        command = _compute_command_digest(self._state)
        cold = [
            code.first_step
            for code in used
            if code.command == command and code.first_step is not None
        ]
        self._state.emit(
            CompiledCode(
                kind=kind,
                used_bytes=sum(code.bytes for code in used),
                used_kernels=sum(code.kernels for code in used),
                used_from=tuple(dict.fromkeys(code.job_id for code in used)),
                sent_to=tuple(node for node in self._sent if node in nodes),
                new_bytes=added.bytes if added else 0,
                new_kernels=added.kernels if added else 0,
                first_step=first_step,
                first_step_before=cold[-1] if cold else None,
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

    def _list_used(self) -> list[StoredCode]:
        return [code for kind in self._group_nodes() for code in self._stored.get(kind, ())]

    def _warn_of_compilers(self, kind: str) -> None:
        """Warn where jobs compile for CPUs, and a node cannot.

        PyTorch looks for a compiler even where all code is there (InvalidCxxCompiler, torch 2.13).
        """
        facts = {node: self._state.facts[node] for node in self._group_nodes()[kind]}
        without = [
            node
            for node, one in facts.items()
            if one.code and not one.code.compiler and not one.gpus
        ]
        if without:
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


def _describe_stored(stored: Sequence[StoredCode]) -> str:
    jobs = list(dict.fromkeys(code.job_id for code in stored))
    size = format_size(sum(code.bytes for code in stored))
    kernels = format_count(sum(code.kernels for code in stored), "kernel")
    noun = "job" if len(jobs) == 1 else "jobs"
    return f"{noun} {shorten_names(jobs)} ({size}, {kernels})"


def _compute_command_digest(state: State) -> str:
    return Digest.of(canonical_json([state.job.name, *state.job.launch.command]))
