"""The places of a job's ranks: its driver is asked, or its last answer is read; and their text."""

from __future__ import annotations

import json
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bundle.driver.hangs import get_main_frames
from bundle.protocol.codec import decode
from bundle.protocol.counts import format_count
from bundle.protocol.events import JobStacks
from bundle.protocol.messages import CollectiveState, ProcessState, RankState
from bundle.system import permissions
from bundle.system.hostlist import fold_hosts

from ..core.errors import StagerError
from ..core.files import read_bytes
from ..diagnosis.failure import format_hang, format_ranks
from ..logs.job_files import JobFiles, KeptJob, format_time
from ..logs.job_record import JobRecord, read_events

# --- The question to a job's driver, and its answer ----------------------------------------------

WAIT_SECONDS = 40.0
"""An answer takes five seconds: the driver asks the nodes twice, 3 s apart. A node that does not
answer takes 15 s each time, and its ranks are shown without stacks."""
_POLL_SECONDS = 0.2

_Stamp = tuple[int, int]  # the inode and the time of a file, which tell an answer from an older one


class FoundStacks(NamedTuple):
    """The places of a job's ranks."""

    stacks: JobStacks
    job: KeptJob
    has_ended: bool
    """True if the job has ended, and this is the last answer of its driver."""


def find_stacks(
    files: JobFiles, say: Callable[[str], None], seconds: float = WAIT_SECONDS
) -> FoundStacks:
    """Ask the driver of a running job where its ranks are; return the last answer of another.

    Raises:
        StagerError: the job cannot be asked, its driver does not answer within these seconds, or
            the job has ended without an answer.
    """
    if not files.ours:
        raise StagerError(
            f"the logs in {files.folder} are not those of a job of stager's",
            hint="only its jobs can be asked where their ranks are",
        )
    job, record = files.read_job(), read_events(files.events)
    if record.result is None:
        _refuse_unwatched(files, job, record)
        say(f"asking job {files.job_id} where its ranks are: up to {seconds:.0f} s")
        return FoundStacks(_ask_driver(files, job, seconds), job, has_ended=False)
    last = read_stacks(files)
    if last is None:
        raise StagerError(
            f"job {files.job_id} has ended, and no stacks of its ranks were kept",
            hint=f"ask while it runs; `stager diagnose {files.job_id}` explains how it ended",
        )
    return FoundStacks(last, job, has_ended=True)


def read_stacks(files: JobFiles) -> JobStacks | None:
    """Return the last answer of a job's driver; None where there is none that can be read."""
    try:
        return decode(JobStacks, json.loads(read_bytes(files.stacks)), strict=False)
    except (OSError, ValueError, RecursionError):
        return None


def _refuse_unwatched(files: JobFiles, job: KeptJob, record: JobRecord) -> None:
    if not record.has_launched:
        raise StagerError(
            f"the ranks of job {files.job_id} have not been started yet",
            hint=f"`tail -f {files.events}` shows what its nodes do",
        )
    if not job.launch.watch:
        raise StagerError(
            f"job {files.job_id} was started with launch.watch = false, or by an older version",
            hint="its ranks cannot be asked; set watch = true below [launch] for the next job",
        )


def _ask_driver(files: JobFiles, job: KeptJob, seconds: float) -> JobStacks:
    before, request = _read_stamp(files.stacks), files.stacks_request
    is_own, is_answered = True, False
    try:
        open(request, "xb", opener=permissions.make_opener(job.log_mode)).close()
    except FileExistsError:  # of another question, whose answer is one to this, too
        is_own = False
    except OSError as exc:
        raise StagerError(
            f"the log directory {files.folder} cannot be written, and a request to the driver is "
            f"a file in it: {exc.strerror or exc}",
            hint=f"ask the owner of the job to run `stager stacks {files.job_id}`",
        ) from exc
    try:
        is_answered = _wait_until_removed(request, seconds)
    finally:
        if is_own and not is_answered:  # nobody waits any more
            with suppress(OSError):
                request.unlink()
    answer = read_stacks(files) if is_answered and _read_stamp(files.stacks) != before else None
    if answer is not None:
        return answer
    what = f"the driver of job {files.job_id} has not answered within {seconds:.0f} s"
    if is_answered:
        what = f"the driver of job {files.job_id} has removed the request without an answer"
    raise StagerError(
        what,
        hint=f"see whether the job still runs (`squeue -j {files.job_id}` for one of Slurm's), and "
        f"what its driver did last: the end of {files.events}",
        context=[f"the last answer is an older one: {files.stacks}"] if before else [],
    )


def _wait_until_removed(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        # Opening a directory asks an NFS server whether it has changed; a look for a name in it
        # may be answered from a cache for half a minute (nfs(5), "Directory entry caching").
        with suppress(OSError):
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
        if not os.path.lexists(path):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _read_stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


# --- Ranks that are at the same place, and the text about them -----------------------------------

_WIDTH = 80
_MOST_FRAMES = 12
_STATES = {
    **dict.fromkeys("Tt", "is stopped by a signal or a debugger"),
    "D": "is held by the kernel, as for a file or a device",
    **dict.fromkeys(("Z", "X", ""), "has ended"),
}
"""The states of processes that say something, in words."""
_STAGED = re.compile(
    r"^.*/stager-\d+/(?:envs/[0-9a-f]{64}/(?:project/|lib/python[\d.]+/site-packages/)?)?"
)
"""The beginning of a path on a node, which may differ from node to node."""
_STARTERS = ("runpy", "run_wrapper")  # the outermost frames of every rank
_LIBRARY = re.compile(
    r"^<(?:frozen )?([\w.]+)|/(?:site|dist)-packages/(\w+)|(?:^|/)(run_wrapper)\.py:"
    r"|/lib(?:64)?/python3[\d.]*/(?!(?:site|dist)-packages/)(\w+)"
)
"""Frames that are not the program's own (those of :mod:`bundle.driver.hangs`), and their names."""


class RankGroup(NamedTuple):
    """Ranks that are at the same place."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    state: RankState
    """That of the first of them."""

    def __str__(self) -> str:
        named = format_ranks(self.ranks)
        if len(self.ranks) > 1:
            named = f"{format_count(len(self.ranks), 'rank')}: {named.partition(' ')[2]}"
        return f"{named} on {fold_hosts(self.nodes)}"


def group_ranks(stacks: JobStacks) -> list[RankGroup]:
    """Return the ranks by their places, the smaller groups first: an outlier is at the top."""
    placed = ((state.rank, node, state) for node, some in stacks.nodes.items() for state in some)
    groups: dict[tuple[object, ...], list[tuple[int, str, RankState]]] = {}
    for one in sorted(placed, key=lambda one: one[0]):
        state = one[2]
        signs = tuple(dict.fromkeys((child.name, child.state) for child in _list_bad(state)))
        frames = tuple(_STAGED.sub("", frame) for frame in get_main_frames(state))
        its_state = state.process.state if state.process.state in _STATES else "S"
        places = (frames, its_state, signs, _describe_collectives(state), state.no_answer)
        groups.setdefault(places, []).append(one)
    ranked = sorted(groups.values(), key=lambda group: (len(group), group[0][0]))
    return [
        RankGroup(
            ranks=tuple(rank for rank, _, _ in group),
            nodes=tuple(dict.fromkeys(node for _, node, _ in group)),
            state=group[0][2],
        )
        for group in ranked
    ]


def describe_stacks(found: FoundStacks, *, is_full: bool = False) -> Iterator[str]:
    """Yield the verdict, then each group of ranks, in lines of 80 columns.

    ``is_full`` shows all frames of all threads.
    """
    stacks = found.stacks
    if stacks.hang is not None:
        yield from _wrap(format_hang(stacks.hang))
        yield ""
    when, silence = format_time(stacks.time), f"{stacks.silent:.0f} s after the last output"
    ended = " (the job has ended)" if found.has_ended else ""
    yield from _wrap(f"job {stacks.job_id} at {when}, {silence}{ended}")
    if stacks.ending:
        yield "only ranks that had been told to end, and had not:"
    groups = group_ranks(stacks)
    if not groups:
        yield "no rank is running"
    for group in groups:
        yield ""
        yield from _wrap(str(group))
        for line in _describe_state(group.state):
            yield from _wrap(line, "  ")
        yield from _list_frames(group.state, found.job.run_dir, is_full=is_full)


def _describe_state(state: RankState) -> Iterator[str]:
    if collectives := _describe_collectives(state):
        yield collectives
    if state.process.state in _STATES and state.process.pid:
        yield f"its process {state.process.pid} {_describe_process(state.process)}"
    for child in _list_bad(state)[:_MOST_FRAMES]:
        yield f"process {child.pid} ({child.name}) of rank {state.rank} {_describe_process(child)}"
    if state.no_answer:
        yield f"no stack: {state.no_answer}"


def _list_bad(state: RankState) -> list[ProcessState]:
    return [child for child in state.children if child.state in _STATES]


def _describe_process(process: ProcessState) -> str:
    where = f" ({process.waits_in})" if process.state == "D" and process.waits_in else ""
    return _STATES[process.state] + where


def _describe_collectives(state: RankState) -> str:
    """Return the operations that a rank is in, else the last one that it was in."""
    entered = [group for group in state.groups if group.enqueued >= 0]
    inside = [group for group in entered if group.enqueued > group.completed]
    if inside:
        return f"in {'; in '.join(map(_describe_operation, inside))}"
    last = max(entered, key=lambda group: group.enqueued, default=None)
    return "" if last is None else f"after {_describe_operation(last)}"


def _describe_operation(at: CollectiveState) -> str:
    operation = f"{at.operation or 'collective operation'} {at.enqueued}"
    if 0 <= at.completed < at.enqueued - 1:  # several are under way
        operation += f", waiting for {at.completed + 1}"
    group = f" of group {at.group}" if at.ranks else ""
    return f"{operation}{group}{f', {at.shapes}' if at.shapes else ''}"


def _list_frames(state: RankState, run_dir: str, *, is_full: bool) -> Iterator[str]:
    def shorten(frame: str) -> str:
        return _STAGED.sub("", frame).removeprefix(f"{run_dir}/" if run_dir else "")

    if is_full:
        for thread in state.threads:
            yield _fit(f"  thread {thread.name}:")
            yield from (_fit(f"    {shorten(frame)}") for frame in thread.frames)
        return
    own: list[str] = []
    libraries: dict[str, list[str]] = {}
    for frame in get_main_frames(state):
        found = _LIBRARY.search(frame)
        name = "" if found is None else next(filter(None, found.groups()))
        if found is None:
            own.append(frame)
        elif name not in _STARTERS:
            libraries.setdefault(name, []).append(frame.rpartition("/")[2])
    yield from (_fit(f"  {shorten(frame)}") for frame in own[:_MOST_FRAMES])
    if len(own) > _MOST_FRAMES:
        yield f"  and {len(own) - _MOST_FRAMES} more, which -v shows"
    if libraries:
        parts = (_describe_library(*item) for item in libraries.items())
        yield from _wrap(f"libraries: {', '.join(parts)}", "  ")


def _describe_library(name: str, frames: Sequence[str]) -> str:
    """Return a library, with the innermost of its frames."""
    more = f" and {format_count(len(frames) - 1, 'frame')}" if len(frames) > 1 else ""
    return f"{name} ({frames[0]}{more})"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _fit(line: str) -> str:
    """Return a line that fits: the end of a path tells more than its beginning."""
    excess = len(line) - _WIDTH
    if excess <= 0:
        return line
    indent = len(line) - len(line.lstrip())
    return f"{line[:indent]}...{line[indent + excess + 3 :]}"
