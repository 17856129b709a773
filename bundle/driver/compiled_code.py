"""The compiled code of a job: that of earlier jobs is sent to the nodes, its own is brought back.

Nothing here can fail a job: what goes wrong is noted, and the ranks compile.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import cast

from ..launch.compiled_code import MOST_FILES, receive_code, select_code
from ..node.node_root import code_path
from ..protocol.counts import format_count, format_size
from ..protocol.digest import Digest, canonical_json
from ..protocol.enumerations import Allocation, PhaseName
from ..protocol.events import CompiledCode
from ..protocol.job import CodeStore, Job
from ..protocol.messages import CodeAmount, CollectRequest, LaunchAnswer, NodeRootFacts
from ..protocol.problem import NodeError
from ..results.stream import LINE_LIMIT, read_head, send_selection
from ..system import processes, signals
from . import code_store
from .code_store import StoredCode
from .findings import shorten_names
from .placement import make_scratch_dir, send_code
from .retries import RankProgress
from .state import State

_CRASHES = (-signal.SIGSEGV, -signal.SIGILL, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE)
_EARLY_SECONDS = 60.0  # from the first step until it is kept while ranks run on
_WRITING_SECONDS = 30.0  # without a write, after which a file is taken to be complete
_SILENT_SECONDS = 300.0  # without a byte: a container may have to be imported
_LONGEST_SECONDS = 900.0  # for all of it
_POLL_SECONDS = 0.05
_END_SECONDS = 1.0  # time that a command gets to end
_SPARE_BYTES = 1 << 20  # of names
_NOT_KEPT = "what the ranks have compiled was not kept"
_NO_STORE = CodeStore("", Digest.of(b""), 0)
_MOST_PATHS = 64  # of a kind of node, in each node's request
_ROOM_FACTOR = 3  # for the stream, the files in it, and what the job adds


def list_known_paths(job: Job) -> dict[str, tuple[str, ...]] | None:
    """Return the paths by which a node of each kind sees what it lacks; None if none is used."""
    if job.code_store is None:
        return None
    return {
        kind: tuple(path for code in reversed(stored) for path in code.paths)[:_MOST_PATHS]
        for kind, stored in _list_by_kind(job).items()
    }


def _list_by_kind(job: Job) -> dict[str, list[StoredCode]]:
    found: dict[str, list[StoredCode]] = defaultdict(list)
    if job.code_store is not None:
        for code in code_store.list_stored_code(job.code_store.path, job.code_store.software):
            found[code.kind].append(code)
    return found


class JobCode:
    """The compiled code of one job."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._store = state.job.code_store or _NO_STORE
        self._stored = _list_by_kind(state.job)
        self._early: dict[str, StoredCode] = {}  # kept of this job while it ran, by kind of node
        self._sent: list[str] = []
        self._is_announced = False
        self.compiles_anew = False  # true after a crash: further attempts compile anew

    def send(self) -> None:
        """Send the code for each kind of node to those that lack some."""
        if self.compiles_anew:
            return
        if self._stored:
            self._warn_of_compilers()
        for kind, nodes in self._group_nodes().items():
            if stored := self._list_usable(kind):
                facts = {node: self._state.facts[node].code for node in nodes}
                lacking = tuple(node for node, one in facts.items() if one and not one.has_all)
                with self._note_failure(f"compiled code was not sent to {shorten_names(lacking)}"):
                    self._send_to(kind, stored, lacking)
        self._is_announced = True

    def _list_usable(self, kind: str) -> list[StoredCode]:
        early = [self._early[kind]] if kind in self._early else []
        return [*self._stored.get(kind, ()), *early]

    def _send_to(self, kind: str, stored: Sequence[StoredCode], lacking: tuple[str, ...]) -> None:
        state = self._state
        code_store.mark_as_used(stored)
        jobs = list(dict.fromkeys(code.job_id for code in stored))
        size, kernels = _sum_up(stored)
        what = f"{format_size(size)}, {format_count(kernels, 'kernel')}"
        noun = "job" if len(jobs) == 1 else "jobs"
        used = f"compiled code of {noun} {shorten_names(jobs)} ({what}) is used"
        if not lacking:
            if not self._is_announced:
                state.note(used)
            return
        state.note(f"{used}, and sent to {shorten_names(lacking)}")
        self._refuse_small_disks(lacking, _ROOM_FACTOR * size)
        with make_scratch_dir() as folder:
            path = os.path.join(folder, "code")
            for why in code_store.write_shipment(stored, path):
                state.note(f"not all compiled code is used: {why}", warning=True)
            failed: dict[str, str] = {}
            if state.job.allocation is Allocation.LOCAL:
                self._place_here(path, kind, lacking)
            else:
                failed = send_code(state, path, kind, lacking)
        self._note_sent(lacking, failed)

    def _note_sent(self, nodes: Sequence[str], failed: Mapping[str, str]) -> None:
        for node in nodes:
            facts = self._state.facts[node]
            if node not in failed and facts.code is not None:
                self._sent.append(node)
                self._state.facts[node] = replace(facts, code=replace(facts.code, has_all=True))
        for node, why in failed.items():
            raise ValueError(f"{node}: {why}")

    def _refuse_small_disks(self, nodes: Sequence[str], size: int) -> None:
        for node in nodes:
            host = self._state.facts[node].host
            place = host.node_root if host else None
            if isinstance(place, NodeRootFacts) and place.free_bytes < size:
                raise ValueError(f"{node} has room for {format_size(place.free_bytes)} only")

    def _place_here(self, path: str, kind: str, nodes: Sequence[str]) -> None:
        for node in nodes:
            target = code_path(self._state.facts[node].root, kind)
            with open(path, "rb") as stream:
                receive_code(stream, f"{target}.new-{self._state.job.id}", target, node)

    def choose_directory(self, node: str) -> str:
        """Return the name of a node's directory for compiled code; empty for none of ours."""
        facts = self._state.facts[node].code
        if facts is None:
            return ""
        return f"{facts.kind}.{self._state.job.id}" if self.compiles_anew else facts.kind

    def look_for_crashes(self) -> None:
        """Let further attempts compile anew where a rank was ended as by its compiled code."""
        answers = self._state.get_answers(LaunchAnswer).values()
        records = [record for answer in answers for record in answer.failures]
        if not any(record.exit_code in _CRASHES for record in records):
            return
        for code in self._early.values():
            code_store.remove_stored_code(code.path)
        self._early.clear()
        if not self.compiles_anew and any(map(self._stored.get, self._group_nodes())):
            self._state.note(
                "a rank crashed that had compiled code of earlier jobs: another attempt compiles "
                'anew, and with launch.compile-cache = "off" no such code is used',
                warning=True,
            )
        self.compiles_anew = True

    @contextmanager
    def keep_early(self, progress: RankProgress) -> Iterator[None]:
        """Keep what was compiled while the ranks run on, where nothing was kept before."""
        transport = self._state.transport
        before, steps = transport.tick, self._keep_early(progress)

        def tick() -> None:
            before()
            next(steps, None)

        transport.tick = tick
        try:
            yield
        finally:
            transport.tick = before
            steps.close()

    def _keep_early(self, progress: RankProgress) -> Generator[None, None, None]:
        if self.compiles_anew or not self._can_keep():
            return
        while progress.count_seconds_since_first_step() < _EARLY_SECONDS:
            yield
        for kind, nodes in self._group_nodes().items():
            node = next(filter(self._state.job.nodes.__contains__, nodes), "")
            if node and not self._list_usable(kind):
                with self._note_failure(_NOT_KEPT):
                    code = self._describe(node)
                    added = yield from self._collect(node, code, 0.0, _WRITING_SECONDS)
                    if added is not None:
                        self._early[kind] = added

    def prepare_return(self, first_step: float | None, *, failed: bool) -> None:
        """Let the job's end keep what the ranks have compiled; after a failure, if all answered."""
        answers = self._state.get_answers(LaunchAnswer)
        if failed and len(answers) < len(self._state.job.nodes):
            return
        amounts = {node: one.code for node, one in answers.items() if one.code is not None}
        ended = time.monotonic() if failed else None
        self._state.keep_compiled_code = lambda: self._bring_back(amounts, first_step, ended)

    def _bring_back(
        self, amounts: Mapping[str, CodeAmount], first_step: float | None, ended: float | None
    ) -> None:
        """Keep what ranks have compiled, from one node of each kind; ``ended`` if they failed."""
        if self.compiles_anew:
            return
        unchanged = 0.0 if ended is None else _WRITING_SECONDS + time.monotonic() - ended
        for kind, nodes in self._group_nodes().items():
            added: StoredCode | None = None
            if self._can_keep():
                with self._note_failure(_NOT_KEPT):
                    own = {node: amounts[node] for node in nodes if node in amounts}
                    added = self._keep_new(kind, own, first_step, unchanged)
            self._report(kind, nodes, added, first_step)

    def _keep_new(
        self,
        kind: str,
        amounts: Mapping[str, CodeAmount],
        first_step: float | None,
        unchanged: float,
    ) -> StoredCode | None:
        """Keep the files of the node that has the most new ones; all of one if nothing was kept."""
        is_first = not self._stored.get(kind)
        sizes = {
            node: (one.total, one.total_bytes) if is_first else (one.new, one.new_bytes)
            for node, one in amounts.items()
        }
        node = max(sizes, key=lambda node: sizes[node], default="")
        if not node or not sizes[node][1]:
            return None
        self._refuse_too_much(*sizes[node])
        amount, code = amounts[node], self._describe(node)
        if is_first and amount.new == amount.total:
            code = replace(code, first_step=first_step)
        since = 0.0 if is_first else amount.begun
        return _finish(self._collect(node, code, since, unchanged))

    def _describe(self, node: str) -> StoredCode:
        job, facts = self._state.job, self._state.facts[node].code
        if facts is None:
            raise ValueError(f"{node} has said nothing of compiled code")
        command = _compute_command_digest(self._state)
        software = self._store.software
        return StoredCode(facts.kind, facts.machine, software, job.id, job.bundle_id, command)

    def _collect(
        self, node: str, code: StoredCode, since: float, unchanged: float
    ) -> Generator[None, None, StoredCode | None]:
        """Keep a node's compiled code; yields while that takes time. None if there is none."""
        from concurrent.futures import ThreadPoolExecutor

        state, name = self._state, self.choose_directory(node)
        with code_store.make_scratch(self._store.path) as scratch, ThreadPoolExecutor(1) as pool:
            path = os.path.join(scratch, "stream")
            source = code_path(state.facts[node].root, name)
            if state.job.allocation is Allocation.LOCAL:
                task = pool.submit(_send_to_file, source, since, unchanged, path)
                while not task.done():
                    yield
                task.result()
            else:
                request = CollectRequest(*state.place(node), "", None, name, since, unchanged)
                yield from self._receive(node, request, path)
            added = pool.submit(self._add, node, code, scratch)
            while not added.done():
                yield
            return added.result()

    def _receive(self, node: str, request: CollectRequest, path: str) -> Iterator[None]:
        with open(path, "wb") as file, open(f"{path}.errors", "w+b") as errors:
            fetch = self._state.transport.start_fetch
            process = fetch(PhaseName.COLLECT, {node: request}, file, errors)
            try:
                size, begun = 0, time.monotonic()
                last = begun
                while process.poll() is None:
                    yield
                    now, before, size = time.monotonic(), size, os.fstat(file.fileno()).st_size
                    last = now if size > before else last
                    # The numbers of a node's answer are its own.
                    if size > 2 * self._store.limit + _SPARE_BYTES:
                        raise ValueError(f"{node} has more than launch.compile-cache-limit")
                    if now > last + _SILENT_SECONDS or now > begun + _LONGEST_SECONDS:
                        raise ValueError(f"{node} has not sent all of it in {now - begun:.0f} s")
            finally:
                processes.stop(process, _END_SECONDS)
            if process.returncode:
                errors.seek(0)
                lines = errors.read().decode(errors="replace").split("\n")
                raise ValueError(next(filter(None, reversed(lines)), f"{node} has not sent it"))

    def _add(self, node: str, code: StoredCode, scratch: str) -> StoredCode | None:
        folder = os.path.join(scratch, "code")
        with open(os.path.join(scratch, "stream"), "rb") as stream:
            head = read_head(stream.readline(LINE_LIMIT))
            self._refuse_too_much(head.files, head.bytes)
            stream.seek(0)
            receive_code(stream, os.path.join(scratch, "received"), folder, node)
        if not os.listdir(folder):
            return None
        early = self._early.pop(code.kind, None)
        if early is not None:  # all of it comes again
            code_store.remove_stored_code(early.path)
        return code_store.add_code(self._store.path, folder, code, self._store.limit)

    def _can_keep(self) -> bool:
        path = self._store.path  # whose parent may not be seen from here
        place = path if os.path.lexists(path) else os.path.dirname(path)
        return bool(self._store.limit) and os.access(place, os.W_OK)

    def _refuse_too_much(self, files: int, size: int) -> None:
        if files > MOST_FILES or size > self._store.limit:
            found = f"{format_count(files, 'file')}, {format_size(size)}"
            raise ValueError(f"it is more than the limit ({found})")

    def _report(
        self, kind: str, nodes: Sequence[str], added: StoredCode | None, first_step: float | None
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
        if without and not self._is_announced:
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


def _send_to_file(source: str, since: float, unchanged: float, path: str) -> None:
    with open(path, "wb") as file:
        send_selection(select_code(source, since, unchanged), source, file)


def _finish(steps: Generator[None, None, StoredCode | None]) -> StoredCode | None:
    """Do all steps; a signal to end lets the rest be."""
    told: list[None] = []
    with closing(steps), signals.handle_signals(lambda: told.append(None)):
        while not told:
            try:
                next(steps)
            except StopIteration as end:
                return cast("StoredCode | None", end.value)
            time.sleep(_POLL_SECONDS)
    raise ValueError("stager was told to end")


def _sum_up(stored: Sequence[StoredCode]) -> tuple[int, int]:
    return sum(code.bytes for code in stored), sum(code.kernels for code in stored)


def _compute_command_digest(state: State) -> str:
    return Digest.of(canonical_json([state.job.name, *state.job.launch.command]))
