"""``stager build --trace``: a smoke test in the bundle, what it never read, and the way back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.building import STAGER, Project, left_in_tmp
from tests.support.processes import living, until
from tests.support.wheelhouse import make_wheel

BIG = "x" * 600_000
FILES = {
    "p/__init__.py": "from . import core\n",
    "p/core.py": "import pathlib\nVALUE = pathlib.Path(__file__).with_name('table').read_text()\n",
    "p/table": "1",
    "p/lazy/__init__.py": "NAME = 'lazy'\n",
    "p/lazy/data": BIG,
    "p/tests/test_it.py": "",
    "p/tests/data/big": BIG * 2,
    "p/lib/libp.a": BIG,
    "p/lib/small": "x",
    "p/lib/libp_cuda.so": BIG,
}
IDLE = {"idle/__init__.py": "", "idle/part/data": BIG * 3, "idle/more/data": BIG}
TRAIN = """\
import sys
import p
print("value", p.core.VALUE, sys.argv[1:], flush=True)
if "--lazy" in sys.argv:
    import p.lazy
    print(p.lazy.NAME)
"""


@pytest.fixture
def traced(project: Project, tmp_path: Path) -> Project:
    """A project with one package that its script uses in part, and one that it does not use."""
    wheels = (make_wheel(tmp_path, "p", files=FILES), make_wheel(tmp_path, "idle", files=IDLE))
    (project.root / "train.py").write_text(TRAIN)
    return project.locked(*wheels, more='imports = ["p"]')


def accept(project: Project, lines: list[str]) -> None:
    """Paste what was printed into the settings, as a user would."""
    settings = project.root / "stager.toml"
    settings.write_text(settings.read_text().rstrip() + "\n" + "\n".join(lines) + "\n")


def test_what_was_never_read_is_proposed_and_a_pruned_build_is_proved(traced: Project) -> None:
    report = traced.report("build", "--trace", "--", "train.py", "--smoke")
    found = report["trace"]
    assert found["command"] == ["train.py", "--smoke"]
    assert found["gpus"] == 0
    assert found["proposed"] == ["idle:/idle/*/", "p:/p/tests/", "p:/p/lazy/", "p:/p/lib/libp.a"]
    unread = {(part["package"], part["path"]): part for part in found["unread"]}
    tests = unread["p", "p/tests/"]
    assert (tests["files"], tests["bytes"], tests["reason"]) == (2, 1_200_000, "")
    (apart,) = [part for part in found["unread"] if "GPU" in part["reason"]]
    assert (apart["pattern"], apart["bytes"]) == (None, 600_000)
    packages = {package["name"]: package for package in found["packages"]}
    assert [name for name, package in packages.items() if not package["used"]] == ["idle"]
    assert 0 < packages["p"]["bytes_read"] < 100_000
    assert found["files"] == sum(package["files"] for package in packages.values())
    assert found["proposed_bytes"] > 4_000_000

    done = traced.expect("build", "--trace", "--", "train.py", "--smoke")
    assert "value 1 ['--smoke']" in done.stdout
    lines = done.stdout.splitlines()
    start = lines.index("prune = [")
    shown = lines[lines.index(next(line for line in lines if line.startswith("package "))) : start]
    assert all(len(line) <= 80 for line in shown if not line.startswith("#"))
    assert "nothing was read of idle" in done.stderr
    assert "files for a GPU are not proposed" in done.stderr
    assert lines[-1] == report["bundle"]

    accept(traced, lines[start : lines.index("]") + 1])
    pruned = traced.report("build", "--trace", "--", "train.py", "--smoke")
    assert pruned["pruned"]["what"] == sorted(found["proposed"])
    assert pruned["trace"]["prune"] == sorted(found["proposed"])
    assert pruned["trace"]["proposed"] == []
    assert pruned["unpacked_bytes"] < report["unpacked_bytes"] - 4_000_000

    done = traced.expect("build", "--trace", "--", "train.py", "--lazy", code=3)
    assert "the smoke test failed, so nothing is proposed: ModuleNotFoundError" in done.stderr
    assert "hint: it may need what environment.prune leaves out" in done.stderr
    assert "prune = [" not in done.stdout
    assert left_in_tmp(traced.store) == []


def test_the_settings_of_a_cluster_do_not_matter(traced: Project) -> None:
    """The smoke test is one rank on this machine."""
    settings = traced.root / "stager.toml"
    more = '[cluster]\nnodes = 4\nmin-nodes = 2\nstage = "always"\n[launch]\nnproc-per-node = 8\n'
    more += 'launcher = "srun"\nbackend = "nccl"\ninterface = "nosuch0"\n'
    settings.write_text(settings.read_text() + more)
    failed = traced.expect("build", "--trace", "--json", "--no-prove", "--", "nosuch.py", code=1)
    assert "nosuch.py" in json.loads(failed.stdout)["error"]["message"]
    (traced.root / "world.py").write_text("import os, p\nprint('of', os.environ['WORLD_SIZE'])\n")
    done = traced.expect("build", "--trace", "--no-prove", "--", "world.py")
    assert "of 1\n" in done.stdout


def test_ctrl_c_leaves_nothing(traced: Project, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    (traced.root / "slow.py").write_text(
        f"import pathlib, time, p\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(600)\n"
    )
    running = subprocess.Popen(
        [*STAGER, "build", "--trace", "--no-prove", "--", "slow.py"],
        cwd=traced.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        assert until(mark.exists)
        (place,) = (traced.store.root / "tmp").iterdir()
        assert re.fullmatch(r"trace-[0-9a-f]{16}", place.name)
        os.killpg(running.pid, signal.SIGINT)
        output, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130, said
    assert "prune = [" not in output
    assert left_in_tmp(traced.store) == []
    assert living(place) == []
