from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.protocol.enumerations import Ending, FailureClass
from stager.core.store import Store
from stager.incidents import pending_jobs
from stager.incidents.node_history import DAY, find_incidents, read_incidents
from stager.incidents.pending_jobs import (
    MAX_BYTES,
    NOTE_DAYS,
    PendingJob,
    drop_note,
    find_first_failure,
    note_job,
    read_ended_job,
    settle_notes,
)
from stager.pack.bundle_file import list_marked, mark
from tests.support.incidents import ENDED, FULL, event_log


def pending(logs: Path, job_id: str = "4711") -> PendingJob:
    return PendingJob(job_id=job_id, log_dir=str(logs), project="demo", submitted=ENDED - 60)


def notes(store: Store) -> list[Path]:
    return sorted(store.pending_jobs.iterdir())


def names(store: Store) -> list[str]:
    return [incident.node for incident in read_incidents(store, 7, ENDED)]


def test_a_job_that_is_over_is_read_once(store: Store, logs: Path) -> None:
    assert note_job(store, pending(logs))
    event_log(logs, {"n2": [FULL]}, left_out={"n3": [FULL]}, nodes=("n1", "n2", "n3", "n4"))
    for _ in range(2):
        settle_notes(store, ENDED)
        assert sorted(names(store)) == ["n2", "n3"]
        assert notes(store) == []


def test_a_job_that_runs_is_read_later(store: Store, logs: Path) -> None:
    note_job(store, pending(logs))
    settle_notes(store, ENDED)  # it waits in the queue
    event_log(logs, {}, ended=None)
    settle_notes(store, ENDED)
    assert (names(store), len(notes(store))) == ([], 1)
    event_log(logs, {"n2": [FULL]})
    settle_notes(store, ENDED)
    assert (names(store), notes(store)) == (["n2"], [])


def test_the_bundle_of_a_job_is_marked_until_its_end_is_seen(store: Store, logs: Path) -> None:
    bundles = [store.bundles / f"demo-{number:012d}.pkgs.tar" for number in (1, 2)]
    for bundle, job_id in zip(bundles, ("4711", "4712"), strict=True):
        bundle.touch()
        assert mark(store, bundle, job_id)
        note_job(store, replace(pending(logs, job_id), bundle=str(bundle)))
    settle_notes(store, ENDED)  # both wait in the queue
    assert list_marked(store, time.time()) == bundles
    event_log(logs, {})
    settle_notes(store, ENDED)
    assert list_marked(store, time.time()) == bundles[1:]
    drop_note(store, "4712")
    assert list_marked(store, time.time()) == []


def test_what_could_not_be_kept_is_tried_again(
    store: Store, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_job(store, pending(logs))
    event_log(logs, {"n2": [FULL]})
    with monkeypatch.context() as patch:
        patch.setattr(pending_jobs, "keep_incidents", lambda *_: False)
        settle_notes(store, ENDED)
    assert len(notes(store)) == 1
    settle_notes(store, ENDED)
    assert (names(store), notes(store)) == (["n2"], [])


def test_notes_that_are_not_reached_in_time_stay_for_the_next_command(
    store: Store, logs: Path
) -> None:
    for number in range(3):
        note_job(store, pending(logs, str(number)))
        event_log(logs, {"n2": [FULL]}, job_id=str(number))
    for left in (2, 1, 0):
        settle_notes(store, ENDED, seconds=0)
        assert len(notes(store)) == left


def test_a_job_that_begins_again_keeps_its_note(store: Store, logs: Path) -> None:
    note_job(store, pending(logs))
    event_log(logs, {}, left_out={"n3": [FULL]}, ended_by=Ending.REQUEUED.value)
    for _ in range(2):
        settle_notes(store, ENDED)
    assert (names(store), len(notes(store))) == (["n3"], 1)
    event_log(logs, {"n2": [FULL]}, ended=ENDED + 60)
    settle_notes(store, ENDED)
    assert (sorted(names(store)), notes(store)) == (["n2", "n3"], [])


def test_a_job_that_never_begins_is_given_up_after_a_while(store: Store, logs: Path) -> None:
    note_job(store, pending(logs))
    settle_notes(store, ENDED + (NOTE_DAYS - 1) * DAY)
    assert len(notes(store)) == 1
    settle_notes(store, ENDED + (NOTE_DAYS + 1) * DAY)
    assert notes(store) == []
    # Not one that still writes.
    note_job(store, pending(logs))
    events = event_log(logs, {}, ended=None)
    late = ENDED + 2 * NOTE_DAYS * DAY
    os.utime(events, (late, late))
    settle_notes(store, late)
    assert len(notes(store)) == 1


def test_a_result_behind_more_events_than_are_examined(store: Store, logs: Path) -> None:
    note_job(store, pending(logs))
    with event_log(logs, {}, ended=None).open("a") as file:
        file.write('{"v": 1, "event": "note", "text": "%s"}\n' % ("x" * (3 << 20)))
    settle_notes(store, ENDED)
    assert len(notes(store)) == 1
    event_log(logs, {"n2": [FULL]}, logs_fault="x" * (3 << 20))
    settle_notes(store, ENDED)
    assert (names(store), notes(store)) == (["n2"], [])


def test_notes_that_are_damaged_or_too_large_are_removed(store: Store, logs: Path) -> None:
    folder = store.pending_jobs
    (folder / "1800000000000-1.json").write_text("{")
    (folder / "1800000000000-2.json").write_bytes(b"\0" * (MAX_BYTES + 1))
    note_job(store, pending(logs, "3"))
    (theirs,) = folder.glob("*-3.json")
    theirs.rename(folder / "1800000000000-33.json")  # a note of another job
    settle_notes(store, ENDED, seconds=600)
    assert notes(store) == []


def test_what_is_no_note_of_this_user_is_left_alone(store: Store, logs: Path) -> None:
    folder = store.pending_jobs
    (folder / "read.me").write_text("")
    (folder / "1800000000000-1.json").symlink_to("/dev/zero")
    (folder / "1800000000000-2.json").mkdir()
    before = notes(store)
    settle_notes(store, ENDED)
    assert notes(store) == before


def test_a_note_of_another_user_is_not_read(
    store: Store, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_job(store, pending(logs))
    event_log(logs, {"n2": [FULL]})
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    settle_notes(store, ENDED)
    assert (names(store), len(notes(store))) == ([], 1)


def test_of_too_many_notes_the_oldest_go(
    store: Store, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_jobs, "MAX_NOTES", 2)
    for number in (0, 1, 2, 22):
        note_job(store, pending(logs, str(number)))
    settle_notes(store, ENDED, seconds=600)
    assert [path.name.rpartition("-")[2] for path in notes(store)] == ["2.json", "22.json"]
    drop_note(store, "2")  # a job that was followed needs none
    assert [path.name.rpartition("-")[2] for path in notes(store)] == ["22.json"]


def test_a_store_that_cannot_be_written_is_no_failure(tmp_path: Path, logs: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file")
    assert not note_job(store, pending(logs))
    settle_notes(store, ENDED)


# --- jobs that are over ---


def test_a_job_that_began_before_it_was_submitted_is_another_of_its_number(
    store: Store, logs: Path
) -> None:
    event_log(logs, {"n2": [FULL]})
    note_job(store, replace(pending(logs), submitted=ENDED + DAY))
    settle_notes(store, ENDED + DAY)
    assert (names(store), len(notes(store))) == ([], 1)


def test_events_that_are_none_say_nothing(tmp_path: Path) -> None:
    assert read_ended_job(tmp_path / "nowhere", "4711") is None
    (tmp_path / "events.12.jsonl").write_bytes(b"\xff\n\n{}\n[]\n")
    assert read_ended_job(tmp_path, "12") is None


def test_a_line_of_a_log_may_show_that_a_node_is_broken(tmp_path: Path) -> None:
    event_log(tmp_path, {}, exit_codes={"n1": 1, "n2": 1, "n3": 1})
    job = read_ended_job(tmp_path, "4711")
    assert find_first_failure(job, tmp_path, "4711") is None  # it ended well
    line = "[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    failed = {"exit_codes": {"n2": 1}, "tails": {"n2": (line,)}}
    event_log(tmp_path, {"n1": ()}, ended=ENDED + 1, **failed)
    job = read_ended_job(tmp_path, "4711")
    first = find_first_failure(job, tmp_path, "4711")
    assert first.kind is FailureClass.NODE_FAILURE
    (incident,) = find_incidents(job, "4711", "demo", first)
    assert (incident.node, incident.fault, incident.code) == ("n2", "node-failure", "")
    assert incident.cause == "the memory of a GPU is faulty"
