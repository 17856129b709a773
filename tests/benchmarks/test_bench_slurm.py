"""The benchmark's own arithmetic for Slurm: pieces of a bundle, forecasts, and transfers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import broadcasts, forecasts, relays
from benchmarks.errors import BenchError
from bundle.protocol.events import StagingWork
from stager.forecast import MeasuredJob


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("size", [3, 1000, 100_001])
def test_the_pieces_are_the_whole(size: int, count: int, tmp_path: Path) -> None:
    whole = bytes(number % 251 for number in range(size))
    file, folder = tmp_path / "bundle", tmp_path / "parts"
    file.write_bytes(whole)
    folder.mkdir()
    parts = broadcasts.split(file, folder, count)
    assert b"".join(part.read_bytes() for part in parts) == whole
    assert len(parts) == count
    assert max(part.stat().st_size for part in parts) == -(-size // count)


def test_what_a_job_showed_is_in_its_events(tmp_path: Path) -> None:
    assert forecasts.seen(tmp_path) is None
    work = {"sent": 8, "bytes": 9, "files": 1, "linked": 0}
    group = {"how": "sbcast", "nodes": ["a", "b"], "work": work}
    events = [
        {"event": "end", "phase": "preflight", "seconds": 0.5},
        {"event": "plan", "groups": [group], "cpus": 2},
        {"event": "sent", "seconds": 1.5},
        {"event": "unpack", "ok": True, "unpack_seconds": 2.0},
        {"event": "end", "phase": "unpack", "seconds": 2.5},
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "events.7.jsonl").write_text(lines)
    found = forecasts.seen(tmp_path)
    assert found == MeasuredJob(
        nodes=2, cpus=2, work=StagingWork(**work), step=0.5, stage=2.5, send=1.5, unpack=2.0
    )


# --- the relay -----------------------------------------------------------------------------------


def logged(folder: Path, *events: dict[str, object]) -> Path:
    folder.mkdir()
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.7.jsonl").write_text(lines)
    return folder


def test_a_transfer_has_the_seconds_of_its_event(tmp_path: Path) -> None:
    relayed = logged(tmp_path / "a", {"event": "sent", "seconds": 1.5, "relayed": True})
    assert relays.sent_seconds(relayed, relayed=True) == 1.5
    sent = logged(tmp_path / "b", {"event": "job"}, {"event": "sent", "seconds": 2.5})
    assert relays.sent_seconds(sent, relayed=False) == 2.5
    with pytest.raises(BenchError, match="by sbcast at once"):
        relays.sent_seconds(relayed, relayed=False)
