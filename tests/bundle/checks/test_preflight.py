"""The look at a node before anything is sent: through a real agent, and its own parts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.checks import preflight
from bundle.format.manifest import estimate_room
from bundle.node import node_root
from bundle.node.node_root import make_secure_root
from bundle.protocol.enumerations import Allocation
from bundle.protocol.job import Job, Requires
from bundle.protocol.messages import PreflightRequest, RequestReader
from bundle.protocol.problem import NodeError
from bundle.system import network
from stager.pack.bundle import Packed
from tests.support.bundles import OWN, Pair, stage
from tests.support.jobs import ask, job_for

REPO = Path(__file__).resolve().parents[3]
PORTS = range(network.choose_port("4711"), network.choose_port("4711") + 64)
"""Of a job of this number; the first is another one's where tests run side by side."""


def test_preflight_tells_all_that_later_phases_need(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    code, (event,) = ask(program, "preflight", job_for(single, tmp_path))
    assert (code, event["v"], event["event"], event["node"]) == (0, 1, "preflight", "local1")
    assert (event["ok"], event["problems"], event["proj"], event["pkgs"]) == (True, [], True, True)
    assert event["root"] == f"{os.environ['STAGER_NODE_ROOT']}/stager-{os.geteuid()}"
    assert os.access(event["python"], os.X_OK)
    assert event["address"] == "127.0.0.1"
    assert event["port"] in PORTS
    assert event["host"]["cpus"] >= 1
    assert event["seconds"] >= 0


def test_preflight_reports_every_problem_at_once(
    single: Packed, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGER_NODE_ROOT", str(tmp_path / "absent"))
    requires = Requires(python="3.77", machine="pdp11", libc="glibc", libc_version="2.99")
    places = {"run_dir": str(tmp_path / "gone"), "bundle": str(tmp_path / "elsewhere.tar")}
    code, (event,) = ask(
        program, "preflight", job_for(single, tmp_path, requires=requires, **places)
    )
    assert (code, event["ok"], event["pkgs"]) == (3, False, False)
    assert [problem["what"] for problem in event["problems"]] == [
        "no directory on this node can hold the environment",
        "there is no CPython 3.77, which the bundle was built for",
        "the bundle is for another machine",
        "the node's C library is too old",
    ]
    assert event["proj"] is False


def test_a_node_without_an_address_of_its_own_has_that_of_its_way_to_the_driver(
    single: Packed, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one such node would keep all of them from a relay. The head it cannot be."""
    job = job_for(single, tmp_path, allocation=Allocation.SLURM)
    job = replace(job, launch=replace(job.launch, interface="nosuch0"))
    here = [link.address for link in network.local_addresses() if link.interface != "lo"]
    for address in ("", *here[:1]):
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", address)
        _, (event,) = ask(program, "preflight", job, node_rank=1)
        assert (event["ok"], event["address"], event["port"]) == (True, address, 0)
        assert event["no_head"]["where"] == "nosuch0"
    _, (event,) = ask(program, "preflight", job, node_rank=0)
    assert (event["ok"], event["address"]) == (False, "")
    (problem,) = event["problems"]
    assert "nosuch0" in str(problem)


def test_a_host_that_ssh_reaches_at_a_loopback_address_says_so(
    single: Packed, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by the marker whether it sees the run directory, or one of its own of that name."""
    (tmp_path / ".stager-4711-ab").touch()
    monkeypatch.setenv("STAGER_NODE", "local1")
    job = job_for(single, tmp_path, allocation=Allocation.SSH)
    for reached, loopback, marker in (
        ("127.0.1.1", "127.0.1.1", ".stager-4711-ab"),
        ("192.0.2.7", "", ".stager-4711-cd"),
    ):
        monkeypatch.setenv("SSH_CONNECTION", f"127.0.0.1 40000 {reached} 22")
        _, (event,) = ask(program, "preflight", job, marker=marker)
        assert event.get("loopback", "") == loopback
        assert event["proj"] is marker.endswith("ab")


def test_a_port_that_is_taken_is_passed_over(single: Packed, program: Path, tmp_path: Path) -> None:
    job = job_for(single, tmp_path)
    _, (before,) = ask(program, "preflight", job)
    with socket.create_server(("127.0.0.1", before["port"])):
        _, (event,) = ask(program, "preflight", job)
    assert event["ok"]
    assert event["port"] in set(PORTS) - {before["port"]}


# --- what of the bundle is here ------------------------------------------------------------------


def about(packed: Packed) -> dict[str, Any]:
    manifest = packed.manifest
    wheel = manifest.decompressor
    return {
        "heads": [layer.head for layer in manifest.layers],
        "room": [estimate_room([layer]) for layer in manifest.layers],
        "size": packed.path.stat().st_size,
        "wheel": None if wheel is None else [wheel.name, wheel.size],
    }


def choose(job: Job, asked: dict[str, Any]) -> str:
    common = PreflightRequest(job, "local1", 0, 1).to_json()
    made = RequestReader("").first({**common, **asked})
    assert isinstance(made, PreflightRequest)
    return preflight.choose_base_by_need(made)


def test_what_a_node_lacks_is_told_by_number(pair: Pair, program: Path, tmp_path: Path) -> None:
    first, second = pair
    base = Path(os.environ["STAGER_NODE_ROOT"])
    _, (event,) = ask(program, "preflight", job_for(first, tmp_path), **about(first))
    assert (event["ready"], event["lacks"]) == (False, [0, 1, 2])
    assert event["has_wheel"] is (first.manifest.decompressor is None)
    assert event["rate"] > 0
    root = os.path.dirname(os.path.dirname(stage(first, base).path))
    _, (event,) = ask(program, "preflight", job_for(first, tmp_path), **about(first))
    assert (event["ready"], event["pkgs"], event["rate"]) == (True, True, None)
    assert event["lacks"] is None
    _, (event,) = ask(program, "preflight", job_for(second, tmp_path), **about(second))
    (moving,) = [n for n, layer in enumerate(second.manifest.layers) if layer.name == "moving"]
    assert (event["ready"], event["lacks"], event["has_wheel"]) == (False, [moving], True)
    assert event["root"] == root


def test_what_is_here_takes_no_room_again(pair: Pair, tmp_path: Path) -> None:
    """All of it would not fit; the one layer that is not here does."""
    first, second = pair
    base = Path(os.environ["STAGER_NODE_ROOT"])
    place = os.statvfs(base)
    much = place.f_bavail * place.f_frsize * 2
    job = job_for(second, tmp_path, room=(much, 10))
    asked = about(second)
    names = [layer.name for layer in second.manifest.layers]
    asked["room"] = [(1000, 5) if name == "moving" else (much // 2, 5) for name in names]
    with pytest.raises(NodeError, match="free"):
        choose(job, asked)
    stage(first, base)
    assert choose(job, asked) == str(base)
    asked["room"] = [(much, 5)] * 3
    with pytest.raises(NodeError, match="free"):
        choose(job, asked)
    stage(second, base)
    assert choose(job, asked) == str(base)


def test_a_file_that_is_to_be_sent_needs_room_beside_what_it_makes(
    single: Packed, tmp_path: Path
) -> None:
    place = os.statvfs(os.environ["STAGER_NODE_ROOT"])
    free = place.f_bavail * place.f_frsize
    asked = {**about(single), "size": 2 * free}  # others free some meanwhile
    here = job_for(single, tmp_path)
    assert choose(here, asked) == os.environ["STAGER_NODE_ROOT"]
    elsewhere = replace(here, bundle=str(tmp_path / "elsewhere.tar"))
    with pytest.raises(NodeError, match="free"):
        choose(elsewhere, asked)


def test_old_pieces_of_broadcasts_go_and_the_rest_stays(
    single: Packed, program: Path, tmp_path: Path
) -> None:
    job = job_for(single, tmp_path)
    ask(program, "preflight", job)
    incoming = Path(os.environ["STAGER_NODE_ROOT"], OWN, "incoming")
    for name in ("job-7.0", "mine"):
        (incoming / name).mkdir()
        (incoming / name / "bundle.tar").write_bytes(b"half")
    ask(program, "preflight", job)
    assert sorted(os.listdir(incoming)) == ["job-7.0", "mine"]
    preflight.remove_stale_files(str(incoming.parent), time.time() + 2 * 3600)
    assert os.listdir(incoming) == ["mine"]
    shutil.rmtree(incoming)


HOLD = """\
import sys, time
sys.path.insert(0, sys.argv[1])
from bundle.node import node_root as locks
from bundle.node.machine import host_facts
held = locks.make_locked_directory("".join(sys.argv[2:]))
print("held", flush=True)
time.sleep(600)
"""
"""Its command line does not name the directory: the lock alone tells of it."""


def test_directories_of_tasks_that_are_gone_are_swept(base: Path) -> None:
    root = Path(make_secure_root(str(base)))
    jobs = root / "jobs"
    left, named, work, exec_ = (jobs / one for one in ("17.0.0", "18.0.0", "17.work", "exec-7"))
    for folder in (left, named, work, exec_):
        (folder / "output").mkdir(parents=True)
    argv = [sys.executable, "-c", HOLD, str(REPO), str(jobs)[:3], str(jobs)[3:] + "/19.0.0"]
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE) as holder,
        subprocess.Popen(["sleep", "600"], cwd=named) as user,
    ):
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            preflight.remove_stale_files(str(root), time.time())
            assert sorted(os.listdir(jobs)) == ["17.work", "18.0.0", "19.0.0", "exec-7"]
        finally:
            holder.kill()
            user.kill()
    preflight.remove_stale_files(str(root), time.time())
    assert sorted(os.listdir(jobs)) == ["17.work", "exec-7"]


def test_a_directory_is_swept_or_held_and_never_both(base: Path) -> None:
    """Two jobs at a time: one makes its directory while the other looks for left-overs."""
    root = make_secure_root(str(base))
    path, done = os.path.join(root, "jobs", "17.0.0"), threading.Event()

    def sweep() -> None:
        while not done.is_set():
            preflight.remove_stale_files(root, time.time())

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    try:
        for _ in range(100):
            held = node_root.make_locked_directory(path)
            with open(os.path.join(path, "file"), "w", encoding="ascii"):
                pass
            os.remove(os.path.join(path, "file"))
            os.rmdir(path)
            os.close(held)
    finally:
        done.set()
        sweeping.join()
