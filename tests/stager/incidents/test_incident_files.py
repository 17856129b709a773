from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from stager.core.errors import StagerError
from stager.core.store import Store
from stager.incidents import incident_files
from stager.incidents.incident_files import DAY, KEPT_DAYS, MAX_BYTES, MAX_FILES, forget, keep, read
from tests.support.incidents import ENDED, FULL, LOST, ended_job


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "offline")


def names(store: Store, days: int = 7, now: float = ENDED) -> list[str]:
    return [incident.node for incident in read(store, days, now)]


def test_what_is_kept_is_read_again(store: Store) -> None:
    job = ended_job({"n2": [FULL, LOST]})
    assert keep(store, job, ENDED)
    assert [incident.fault for incident in read(store, 7, ENDED)] == ["disk-full", "node-failure"]


def test_a_job_is_counted_once_however_often_it_is_seen(store: Store) -> None:
    for _ in range(3):
        assert keep(store, ended_job({"n2": [FULL]}), ENDED)
    assert names(store) == ["n2"]


def test_files_of_the_future_crowd_nothing_out(store: Store) -> None:
    keep(store, ended_job({"n2": [FULL]}), ENDED)
    folder = store.root / incident_files.INCIDENTS
    for number in range(MAX_FILES):
        (folder / f"9999999999999-{number}.jsonl").touch()
    assert names(store) == ["n2"]
    keep(store, ended_job({"n3": [FULL]}, job_id="12"), ENDED)
    assert sorted(names(store)) == ["n2", "n3"]
    assert len(list(folder.iterdir())) == 2


def test_each_attempt_of_a_requeued_job_counts(store: Store) -> None:
    keep(store, ended_job({"n2": [FULL]}), ENDED)
    keep(store, ended_job({"n2": [FULL]}, ended=ENDED + 60), ENDED)
    assert names(store) == ["n2", "n2"]


def test_only_the_last_days_count(store: Store) -> None:
    for day in (0, 3, 10):
        ended = ENDED - day * DAY
        keep(store, ended_job({f"n{day % 3 + 1}": [FULL]}, ended=ended, job_id=str(day)), ENDED)
    assert names(store, days=1) == ["n1"]
    assert names(store) == ["n1", "n1"]
    assert names(store, days=30) == ["n1", "n1", "n2"]


def test_a_job_without_incidents_leaves_nothing(store: Store) -> None:
    assert keep(store, ended_job(), ENDED)
    assert not store.root.exists()
    assert names(store) == []


def test_a_store_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not keep(Store(tmp_path / "file"), ended_job({"n2": [FULL]}), ENDED)


def test_what_is_damaged_or_cannot_be_true_is_skipped(store: Store) -> None:
    keep(store, ended_job({"n2": [FULL]}), ENDED)
    (path,) = store.incidents.iterdir()
    good = json.loads(path.read_text())
    lies = [
        {"node": "n1,n[2-9]"},
        {"node": "--nodelist=n1"},
        {"node": "n 1"},
        {"node": "\u001b[31mn1"},
        {"node": ""},
        {"fault": "sorcery"},
        {"time": ENDED + 30 * DAY},
        {"time": None},
        {"job_id": "12"},
        {"cause": 7, "node": 8},
    ]
    lines = [json.dumps({**good, **lie}).encode() for lie in lies]
    lines += [b"", b"{", b"null", b"[]", b"\xff\xfe\0", b"[" * 100_000, b'{"node": "n1"}']
    path.write_bytes(b"\n".join([*lines, json.dumps({**good, "newer": 1}).encode()]) + b"\n")
    assert names(store) == ["n2"]


def test_files_that_are_none_of_ours_are_ignored(store: Store, tmp_path: Path) -> None:
    folder = store.incidents
    stamp = f"{int(ENDED * 1000)}"
    (folder / "notes.txt").write_text("{}")
    (folder / f"{stamp}-1.jsonl").mkdir()
    os.mkfifo(folder / f"{stamp}-2.jsonl")
    (folder / f"{stamp}-3.jsonl").symlink_to("/dev/zero")
    (folder / f"{stamp}-4.jsonl").symlink_to(tmp_path / "nowhere")
    with (folder / f"{stamp}-5.jsonl").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert names(store) == []
    keep(store, ended_job({"n2": [FULL]}), ENDED)
    assert names(store) == ["n2"]


def test_the_future_does_not_count(store: Store) -> None:
    keep(store, ended_job({"n2": [FULL]}, ended=ENDED + 2 * DAY), ENDED)
    assert names(store) == []


def test_what_is_old_or_too_much_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_files, "MAX_FILES", 3)
    for number, days in enumerate((KEPT_DAYS + 1, 4, 3, 2, 1)):
        ended = ENDED - days * DAY
        keep(store, ended_job({"n2": [FULL]}, ended=ended, job_id=str(number)), ENDED)
    kept = sorted(path.name.rpartition("-")[2] for path in store.incidents.iterdir())
    assert kept == ["2.jsonl", "3.jsonl", "4.jsonl"]
    assert MAX_FILES == 1000


def test_a_node_is_forgotten_and_its_old_jobs_are_not_counted_again(store: Store) -> None:
    alone, together = ended_job({"n2": [FULL]}), ended_job({"n1": [FULL], "n2": [LOST]}, job_id="5")
    for job in (alone, together):
        keep(store, job, ENDED)
    assert forget(store, {"n2", "n9"}) == 2
    for job in (alone, together):
        keep(store, job, ENDED)
    assert names(store) == ["n1"]
    assert forget(store, {"n2"}) == 0


def test_forgetting_says_where_it_may_not_write(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, ended_job({"n2": [FULL]}), ENDED)
    monkeypatch.setattr(Store, "open_up", _refuse)
    with pytest.raises(StagerError, match="cannot write"):
        forget(store, {"n2"})
    assert names(store) == ["n2"]


def _refuse(store: Store, path: Path) -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("mode", [0o700, 0o2770])
def test_the_root_decides_who_may_read_and_write(store: Store, mode: int) -> None:
    store.root.mkdir()
    store.root.chmod(mode)
    before = os.umask(0o077)
    try:
        keep(store, ended_job({"n2": [FULL]}), ENDED)
    finally:
        os.umask(before)
    (path,) = store.incidents.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == mode & 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) == mode


def _keep_many(root: Path, first: int) -> None:
    for number in range(first, first + 20):
        assert keep(Store(root), ended_job({"n2": [FULL]}, job_id=str(number)), ENDED)
        assert keep(Store(root), ended_job({"n3": [FULL]}, job_id="1"), ENDED)


def test_several_jobs_may_end_at_once(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_keep_many, args=(store.root, 100 * number)) for number in (1, 2, 3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert names(store).count("n2") == 60
    assert names(store).count("n3") == 1
