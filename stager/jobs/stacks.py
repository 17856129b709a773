"""The places of a job's ranks: its driver is asked, or its last answer is read; and their text."""

from __future__ import annotations

import json
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bundle.driver.hangs import get_main_frames
from bundle.launch.wrapper import is_own_file
from bundle.protocol.codec import decode
from bundle.protocol.counts import format_count
from bundle.protocol.events import JobStacks
from bundle.protocol.messages import CollectiveState, ProcessState, RankState
from bundle.system import permissions
from bundle.system.hostlist import fold_hosts

from ..core.errors import StagerError
from ..core.files import read_bytes
from ..diagnosis.failure import format_hang, format_ranks, name_file
from ..logs.job_files import JobFiles, KeptJob, format_time
from ..logs.job_record import JobRecord, read_events

WAIT_SECONDS = 50.0
"""An answer takes five seconds: the driver asks the nodes twice within three. A node that does not
answer takes 20 s each time, and its ranks are shown without stacks."""
_POLL_SECONDS = 0.2


class FoundStacks(NamedTuple):
    """The places of a job's ranks."""

    stacks: JobStacks
    job: KeptJob
    has_ended: bool  # this is the last answer of its driver


def find_stacks(
    files: JobFiles, say: Callable[[str], None], seconds: float = WAIT_SECONDS
) -> FoundStacks:
    """Ask the driver of a running job where its ranks are; return the last answer of another."""
    job, record = read_own_job(files, "only of those can the ranks be asked")
    last = read_stacks(files) if record.result is not None else None
    if last is not None:
        return FoundStacks(last, job, has_ended=True)
    if record.result is not None:
        what = "has ended, and no stacks of its ranks were kept"
        hint = f"ask while it runs; `stager diagnose {files.job_id}` explains how it ended"
    elif not record.has_launched:
        what = "has not started its ranks yet"
        hint = f"`tail -f {files.events}` shows what its nodes do"
    elif not job.launch.watch:
        what = "was started with launch.watch = false, so its ranks cannot be asked"
        hint = "set watch = true below [launch] for the next job"
    else:
        say(f"asking job {files.job_id} where its ranks are: up to {seconds:.0f} s")
        return FoundStacks(_ask_driver(files, job, seconds), job, has_ended=False)
    raise StagerError(f"job {files.job_id} {what}", hint=hint)


def read_own_job(files: JobFiles, why: str) -> tuple[KeptJob, JobRecord]:
    """Return a job's description and its events; refuse logs of another launcher, and say why."""
    if not files.ours:
        raise StagerError(
            f"the logs in {files.folder} are not those of a job of stager's", hint=why
        )
    return files.read_job(), read_events(files.events)


def read_stacks(files: JobFiles) -> JobStacks | None:
    """Return the last answer of a job's driver; None where there is none that can be read."""
    try:
        return decode(JobStacks, json.loads(read_bytes(files.stacks)), strict=False)
    except (OSError, ValueError, RecursionError):
        return None


def _ask_driver(files: JobFiles, job: KeptJob, seconds: float) -> JobStacks:
    before = read_stacks(files)
    is_own, is_answered = _leave_request(files, job), False
    try:
        is_answered = _wait_until_removed(files.stacks_request, seconds)
    finally:
        if is_own and not is_answered:  # nobody waits any more
            with suppress(OSError):
                files.stacks_request.unlink()
    answer = read_stacks(files) if is_answered else None
    if answer is not None and answer != before:
        return answer
    raise StagerError(
        f"the driver of job {files.job_id} has not answered",
        hint=f"see whether it runs (`squeue -j {files.job_id}`), and the end of {files.events}",
        context=[f"the last answer is an older one: {files.stacks}"] if before else [],
    )


def _leave_request(files: JobFiles, job: KeptJob) -> bool:
    """Ask the driver; False where another question is there, whose answer is one to this, too."""
    try:
        opener = permissions.make_opener(job.log_mode)
        open(files.stacks_request, "xb", opener=opener).close()
    except FileExistsError:
        return False
    except OSError as exc:
        why = f"{exc.strerror or exc}, and a request to the driver is a file in it"
        raise StagerError(
            f"the log directory {files.folder} cannot be written: {why}",
            hint=f"ask the owner of the job to run `stager stacks {files.job_id}`",
        ) from exc
    return True


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


# --- Ranks that are at the same place, and the text about them -----------------------------------

_WIDTH = 80
_MOST_FRAMES = 12
_STATES = {
    **dict.fromkeys("Tt", "is stopped by a signal or a debugger"),
    "D": "is held by the kernel, as for a file or a device",
    **dict.fromkeys(("Z", "X", ""), "has ended"),
}
_PACKAGE = re.compile(
    r"(?:^<(?:frozen )?|-packages/|/lib(?:64)?/python3[\d.]*/(?!(?:site|dist)-packages/))(\w+)"
)


def group_ranks(stacks: JobStacks) -> list[tuple[str, RankState]]:
    """Return the ranks at the same place, in words, and the state of one; small groups first."""
    placed = [(state.rank, node, state) for node, some in stacks.nodes.items() for state in some]
    groups: dict[object, list[tuple[int, str, RankState]]] = {}
    for one in sorted(placed, key=lambda one: one[0]):
        groups.setdefault(_get_place(one[2]), []).append(one)
    named = []
    for group in sorted(groups.values(), key=lambda group: (len(group), group[0][0])):
        ranks = format_ranks(rank for rank, _, _ in group)
        nodes = fold_hosts(list(dict.fromkeys(node for _, node, _ in group)))
        several = f"{format_count(len(group), 'rank')}: "
        named.append((f"{ranks.replace('ranks ', several)} on {nodes}", group[0][2]))
    return named


def _get_place(state: RankState) -> tuple[object, ...]:
    """Return what is equal for ranks that are at the same place, on whatever node."""
    return (
        tuple(map(name_file, get_main_frames(state))),
        frozenset((process.name, process.state) for process in _list_bad(state)),
        _describe_collectives(state),
        state.no_answer,
    )


def describe_stacks(found: FoundStacks, *, is_full: bool = False) -> Iterator[str]:
    """Yield the verdict, then each group of ranks; ``is_full``: all frames of all threads."""
    stacks = found.stacks
    if stacks.hang is not None:
        yield from (*_wrap(format_hang(stacks.hang)), "")
    when, silence = format_time(stacks.time), f"{stacks.silent:.0f} s after the last output"
    ended = " (the job has ended)" if found.has_ended else ""
    yield from _wrap(f"job {stacks.job_id} at {when}, {silence}{ended}")
    if stacks.ending:
        yield "only ranks that had been told to end, and had not:"
    groups = group_ranks(stacks)
    if not groups:
        yield "no rank is running"
    list_frames = _list_threads if is_full else _list_frames
    for ranks, state in groups:
        yield ""
        yield from _wrap(ranks)
        for line in _describe_state(state):
            yield from _wrap(line, "  ")
        yield from map(_fit, list_frames(state, found.job.run_dir))
    yield from _describe_nccl(stacks.nccl, is_full=is_full)


def _describe_state(state: RankState) -> Iterator[str]:
    if collectives := _describe_collectives(state):
        yield collectives
    for process in _list_bad(state)[:_MOST_FRAMES]:
        who = f"process {process.pid} ({process.name}) of rank {state.rank}"
        if process is state.process:
            who = f"its process {process.pid}"
        where = f" ({process.waits_in})" if process.state == "D" and process.waits_in else ""
        yield f"{who} {_STATES[process.state]}{where}"
    if state.no_answer:
        yield f"no stack: {state.no_answer}"


def _describe_nccl(text: str, *, is_full: bool) -> Iterator[str]:
    """Yield NCCL's text, or the part of it with errors and warnings, if it has any."""
    lines = text.splitlines()
    if not is_full:
        start = (at for at, line in enumerate(lines) if line.strip() in ("Errors", "Warnings"))
        lines = lines[next(start, len(lines)) :]
    if lines:
        yield from ("", "NCCL's RAS service:")
        yield from (_fit(f"  {line}".rstrip()) for line in lines)


def _list_bad(state: RankState) -> list[ProcessState]:
    processes = (state.process, *state.children)
    return [process for process in processes if process.pid and process.state in _STATES]


def _describe_collectives(state: RankState) -> str:
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


def _list_threads(state: RankState, run_dir: str) -> Iterator[str]:
    for thread in state.threads:
        yield f"  thread {thread.name}:"
        yield from (f"    {name_file(frame, [run_dir])}" for frame in thread.frames)


def _list_frames(state: RankState, run_dir: str) -> Iterator[str]:
    """Yield the program's own frames, then for each library the innermost of its frames."""
    own: list[str] = []
    libraries: dict[str, list[str]] = {}
    for frame in get_main_frames(state):
        package = _PACKAGE.search(frame)
        if is_own_file(frame.rpartition(":")[0]):
            own.append(f"  {name_file(frame, [run_dir])}")
        elif package and package[1] != "runpy":  # the outermost frames of every rank
            libraries.setdefault(package[1], []).append(frame.rpartition("/")[2])
    yield from own[:_MOST_FRAMES]
    if len(own) > _MOST_FRAMES:
        yield f"  and {len(own) - _MOST_FRAMES} more, which -v shows"
    parts = []
    for name, (first, *others) in libraries.items():
        more = f" and {format_count(len(others), 'frame')}" if others else ""
        parts.append(f"{name} ({first}{more})")
    if parts:
        yield from _wrap(f"libraries: {', '.join(parts)}", "  ")


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _fit(line: str) -> str:
    """Return a line that fits: the end of a path tells more than its beginning."""
    indent = line[: len(line) - len(line.lstrip())]
    return line if len(line) <= _WIDTH else f"{indent}...{line[len(indent) + 3 - _WIDTH :]}"
