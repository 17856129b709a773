"""The benchmark's own arithmetic for Slurm: pieces of a bundle, forecasts, and transfers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import broadcasts, forecasts, relays, tools
from benchmarks.errors import BenchError
from benchmarks.rounds import Samples
from bundle.driver.forecast import Nodes, forecast_staging
from bundle.protocol.events import StagingWork
from stager.forecast import MeasuredJob

WORK = StagingWork(sent=300_000_000, bytes=1_400_000_000, files=34_000)


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


def shown(nodes: int, slower: float) -> MeasuredJob:
    """A job on nodes of one machine that took so many times as long as is assumed."""
    made = forecast_staging(WORK, Nodes(nodes, cpus=2, sharing=nodes))
    return MeasuredJob(
        nodes=nodes,
        cpus=2,
        work=WORK,
        step=1.0,
        stage=made.seconds * slower,
        send=made.send * slower,
        unpack=made.unpack * slower,
    )


def test_two_nodes_foretell_the_others() -> None:
    samples = Samples()
    said: list[str] = []
    jobs = {1: [shown(1, 3.0)], 2: [shown(2, 2.0), shown(2, 2.0)], 3: [shown(3, 1.0)]}
    forecasts.compare(jobs, samples, said.append)
    assert [line.rsplit(": ", 1)[1] for line in said] == [
        "1.50",
        "1.00 (fitted to these)",
        "1.00 (fitted to these)",
        "0.50",
    ]
    half = forecast_staging(WORK, Nodes(3, cpus=2, sharing=3)).seconds
    assert samples.of("slurm/3/forecast/cold") == pytest.approx((2 * half,), rel=1e-3)


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


@pytest.mark.usefixtures("index_env")
def test_the_bundle_that_is_sent_has_the_size_that_is_wanted(
    tmp_path: Path, zstandard_wheel: Path
) -> None:
    size = 8_000_000
    (tmp_path / "offline" / "wheels").mkdir(parents=True)
    shutil.copy(zstandard_wheel, tmp_path / "offline" / "wheels")
    installed = tools.Tools(bin=Path(sys.executable).parent, base=tools.base_python())
    bundle = relays.build(tmp_path, size, installed)
    assert bundle.stat().st_size == pytest.approx(size, rel=0.1)
