"""Unpacking that is interrupted, refused or out of room leaves nothing, and the next one works."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.digest import Digest
from stager.pack.bundle import Packed
from tests.support.bundles import (
    BASE_PYTHON,
    CLEAN,
    OWN,
    forge,
    left_over,
    refuses,
    run_node,
    tree,
)
from tests.support.gated_program import gated
from tests.support.processes import until


def start(program: Path, bundle: Path, base: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", program, "unpack", bundle, base, "--python", BASE_PYTHON]
    return subprocess.Popen(
        list(map(str, argv)),
        env=CLEAN,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_of_twenty_at_a_time_one_writes(standard: Packed, program: Path, base: Path) -> None:
    (base / OWN).mkdir(mode=0o700)
    for name in ("incoming", "locks", "envs"):
        (base / OWN / name).mkdir()
    code = f"""
import dataclasses, json, sys
sys.path.insert(0, {str(program)!r})
from bundle.environment import unpack
sys.stdin.readline()
made = unpack.unpack({str(standard.path)!r}, root={str(base / OWN)!r},
    expected={standard.manifest.id!r}, python={BASE_PYTHON!r}, processes=2)
print(json.dumps(dataclasses.asdict(made)))
"""
    gate, open_gate = os.pipe()
    running = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], stdin=gate, stdout=subprocess.PIPE, text=True
        )
        for _ in range(20)
    ]
    os.close(gate)
    time.sleep(0.5)  # most have started and wait at the gate
    os.write(open_gate, b"\n" * 20)
    os.close(open_gate)
    answers = [json.loads(one.communicate(timeout=300)[0]) for one in running]
    assert [one.returncode for one in running] == [0] * 20
    assert {answer["path"] for answer in answers} == {
        str(base / OWN / "envs" / standard.manifest.id)
    }
    writers = [answer for answer in answers if not answer["reused"]]
    assert [answer["written"] for answer in writers] == [standard.manifest.files]
    assert sum(answer["written"] + answer["linked"] for answer in answers if answer["reused"]) == 0
    assert left_over(base) == [f"envs/{standard.manifest.id}"]


def test_killed_at_any_moment_it_can_be_done_again(
    many: Packed, program: Path, base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    slow = gated(program, tmp_path, tmp_path / "no gate")
    started = time.monotonic()
    whole = Path(run_node(program, "unpack", many.path, other).stdout.strip())
    seconds = time.monotonic() - started
    expected, final = tree(whole), base / OWN / "envs" / many.manifest.id
    rng, unfinished = random.Random(3), 0
    for attempt in range(9):
        running = start(program if attempt % 3 else slow, many.path, base)
        if attempt % 3:
            time.sleep(rng.uniform(0.1, 1.0) * seconds)
        else:  # some surely when there is something to leave half done
            assert until(lambda: any("incoming/" in name for name in left_over(base)), pause=0.01)
        if rng.random() < 0.5:
            running.kill()  # its children find out for themselves
        else:
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate(timeout=300)
        found = left_over(base)
        unfinished += any(name.startswith("incoming/") for name in found)
        if f"envs/{many.manifest.id}" in found:
            assert tree(final) == expected
            shutil.rmtree(final)
    assert unfinished >= 3
    assert run_node(program, "unpack", many.path, base).stdout.strip() == str(final)
    assert tree(final) == expected
    assert left_over(base) == [f"envs/{many.manifest.id}"]


def test_what_killed_ones_left_is_swept_by_another_bundle(
    many: Packed, standard: Packed, program: Path, base: Path
) -> None:
    (base / OWN / "incoming").mkdir(parents=True)
    (base / OWN).chmod(0o700)
    dead = base / OWN / "incoming" / f"{many.manifest.id}.abc"
    alive = base / OWN / "incoming" / f"{Digest.of(b'alive')}.abc"
    foreign = base / OWN / "incoming" / "something-else"
    for folder in (dead, alive, foreign):
        (folder / "env" / "lib").mkdir(parents=True)
    (base / OWN / "locks").mkdir()
    with (base / OWN / "locks" / f"{Digest.of(b'alive')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody is making this one
        assert run_node(program, "unpack", standard.path, base).returncode == 0
    assert left_over(base) == [
        f"envs/{standard.manifest.id}",
        f"incoming/{alive.name}",
        "incoming/something-else",
    ]


def test_one_in_use_is_not_waited_for_and_its_open_files_stay(
    standard: Packed, program: Path, base: Path
) -> None:
    """The job that uses it may last for days; what it opens from now on is sound."""
    place = Path(run_node(program, "unpack", standard.path, base).stdout.strip())
    (place / "pyvenv.cfg").unlink()
    tool = place / "bin" / "cli-tool"
    lock = base / OWN / "locks" / f"{standard.manifest.id}.lock"
    with lock.open() as held, tool.open() as opened:
        fcntl.flock(held, fcntl.LOCK_SH)
        running = start(program, standard.path, base)
        assert running.communicate(timeout=300)[0].strip() == str(place)
        assert opened.read() == tool.read_text()
    assert (place / "pyvenv.cfg").exists()
    assert left_over(base) == [f"envs/{standard.manifest.id}"]


# --- damage and forgery --------------------------------------------------------------------------


def test_damage_anywhere_leaves_nothing(
    single: Packed, program: Path, base: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(single.path, tmp_path / "copy.tar"))
    offset, places = 0, []
    for _, length in single.manifest.members():
        places += [offset + 100, offset + 512 + length // 2]
        offset += 512 + length + -length % 512
    places.append(offset + 1)
    for place in places:
        with copy.open("r+b") as handle:
            handle.seek(place)
            byte = handle.read(1)
            handle.seek(place)
            handle.write(bytes([byte[0] ^ 1]))
        assert "damaged" in refuses(program, copy, base), place
        with copy.open("r+b") as handle:
            handle.seek(place)
            handle.write(byte)
    assert run_node(program, "unpack", copy, base).returncode == 0


def file(path: str) -> list[Any]:
    return [path, 0, 0o644, Digest.of(b""), 512]


HOSTILE = {
    "parent": {"files": [file("../escaped")]},
    "absolute": {"files": [file("/tmp/escaped")]},
    "setuid": {"files": [["bin/sh", 0, 0o4755, Digest.of(b""), 512]]},
    "claims-100-gb": {"files": [["lib/large", 100 << 30, 0o644, Digest.of(b""), 512]]},
    "link-outside": {"files": [], "links": [["project/out", "../../../../escaped"]]},
    "link-then-file": {"files": [file("lib/l/escaped")], "links": [["lib/l", "x"]]},
    "chained-links": {
        "files": [],
        "links": [["lib/x/a", ".."], ["lib/x/y/b", "../a/.."], ["lib/x/y/z/c", "../b/../.."]],
    },
    "pyvenv.cfg": {"files": [file("pyvenv.cfg")]},
    "interpreter": {"files": [file("bin/python")]},
    "interpreter-link": {"files": [], "links": [["bin/python3", "../../bin/sh"]]},
    "lib-is-a-link": {"files": [], "links": [["lib", "project"]]},
    "pkgs": {"files": [file("pkgs/escaped")]},
    "manifest": {"files": [file(".stager/manifest.json")]},
    "manifest-link": {"files": [], "links": [[".stager/manifest.json", "site/x"]]},
    "head": {"files": [file(".stager/layers/" + "0" * 64)]},
    "state-is-a-file": {"files": [file(".stager")]},
    "site-is-a-file": {"files": [file(f"lib/{Path(BASE_PYTHON).name}/site-packages")]},
    "patches": {"files": [file(f"lib/{Path(BASE_PYTHON).name}/site-packages/_stager_patches.py")]},
    "long-name": {"files": [file("lib/" + "x" * 300)]},
    "deep": {"files": [file("lib/" + "/".join(["d" * 50] * 100))]},
}


def test_a_forged_layer_that_is_harmless_is_taken(
    single: Packed, program: Path, base: Path, tmp_path: Path
) -> None:
    harmless = {"files": [file("lib/fine")], "links": [["lib/link", "fine"]]}
    path = forge(single.path, tmp_path / "forged.tar", index=lambda raw: raw.update(harmless))
    done = run_node(program, "unpack", path, base)
    assert Path(done.stdout.strip(), "lib", "link").read_bytes() == b""


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_layers_are_refused(
    single: Packed, program: Path, base: Path, tmp_path: Path, what: str
) -> None:
    path = forge(single.path, tmp_path / "forged.tar", index=lambda raw: raw.update(HOSTILE[what]))
    refuses(program, path, base)
    assert sorted(path.name for path in tmp_path.rglob("*escaped*")) == []
    assert not Path("/tmp/escaped").exists()


def test_a_bundle_that_claims_100_gb_is_refused_for_lack_of_room(
    single: Packed, program: Path, base: Path, tmp_path: Path
) -> None:
    def claim(raw: dict[str, Any]) -> None:
        raw["layers"][0]["unpacked_size"] = 100 << 40

    path = forge(single.path, tmp_path / "forged.tar", manifest=claim)
    assert "needs 109951.2 GB" in refuses(program, path, base)
