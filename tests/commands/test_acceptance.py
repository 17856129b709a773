"""What the tool promises, shown on the real stack: isolation, and training with no network."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.namespaces import entering
from tests.support.processes import Done, run
from tests.support.torch_project import STAGER, TorchProject

pytestmark = [pytest.mark.slow, pytest.mark.network]

DECOY = "raise SystemExit('this is the decoy of {place}')\n"
ORIGINS = """\
import json, multiprocessing, os, subprocess, sys

def origin(_=None):
    import torch
    return torch.__file__

if __name__ == "__main__":
    argv = [sys.executable, "-c", "import torch; print(torch.__file__)"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = {
            "rank": origin(),
            "child": subprocess.run(argv, capture_output=True, text=True).stdout.strip(),
            "spawned": pool.map(origin, [0])[0],
            "by name": subprocess.run(["python", *argv[1:]], capture_output=True, text=True)
            .stdout.strip(),
        }
    print("ORIGINS", json.dumps({"env": os.environ["STAGER_ENV"], "found": found}), flush=True)
"""
ALONE = """\
ip link set lo up
if ip -o link show up | grep -v ': lo:'; then exit 9; fi
"""


def decoy(folder: Path, place: str) -> Path:
    """A folder with a package ``torch`` that ends whoever imports it."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(DECOY.format(place=place))
    return folder


def test_the_bundles_torch_is_the_one_imported(torch_project: TorchProject, tmp_path: Path) -> None:
    """With a decoy in the interpreter's own packages, in the user's, and on ``PYTHONPATH``."""
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    asked = [str(base), "-I", "-c", "import site; print(*site.getsitepackages(), sep='\\n')"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    packages = next(folder for folder in listed if Path(folder).is_dir())  # Debian's has its own
    home = tmp_path / "home"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    system = decoy(tmp_path / "system", "the interpreter")
    decoy(home / ".local" / "lib" / version / "site-packages", "the user")
    path = decoy(tmp_path / "path", "PYTHONPATH")
    env = {**torch_project.env, "HOME": str(home), "PYTHONPATH": str(path)}
    prepare = f"mount --bind {shlex.quote(str(system))} {shlex.quote(packages)}"

    def met(argv: list[str], **changed: str) -> Done:
        return run([*entering("-m", prepare), *argv], cwd=tmp_path, env={**env, **changed})

    # Each decoy is where it would be taken from: without the tool, the program meets it.
    code = "import torch"
    assert "decoy of PYTHONPATH" in met([str(base), "-c", code]).stderr
    assert "decoy of the user" in met([str(base), "-c", code], PYTHONPATH="").stderr
    assert "decoy of the interpreter" in met([str(base), "-s", "-c", code], PYTHONPATH="").stderr

    (tmp_path / "origins.py").write_text(ORIGINS)
    options = ["--bundle", str(torch_project.bundle), "--log-dir", str(tmp_path / "logs")]
    options += ["--allocation", "local", "--nodes", "2", "--nproc-per-node", "1", "--verbose"]
    done = met([STAGER, "run", *options, "--", "origins.py"])
    assert done.returncode == 0, done.stderr
    assert "decoy" not in done.stdout + done.stderr
    found = [line.split("ORIGINS ")[1] for line in done.stdout.splitlines() if "ORIGINS" in line]
    assert len(found) == 2
    for line in found:
        facts = json.loads(line)
        own = f"{facts['env']}/lib/{version}/site-packages/torch/__init__.py"
        assert facts["found"] == dict.fromkeys(("rank", "child", "spawned", "by name"), own)


@pytest.mark.full
def test_training_learns_with_no_network(
    torch_project: TorchProject, tmp_path: Path, data_dir: Path
) -> None:
    """The real AG News rows, two nodes with two ranks each, and no interface but loopback up."""
    work = tmp_path / "work"
    work.mkdir()
    options = ["--bundle", str(torch_project.bundle), "--log-dir", str(tmp_path / "logs"), "--json"]
    options += ["--allocation", "local", "--nodes", "2", "--nproc-per-node", "2"]
    training = ["--data", str(data_dir / "ag_news.csv"), "--held-out", "1000", "--epochs", "3"]
    training += ["--vocab", str(data_dir / "bert_uncased_vocab.txt"), "--out", "out"]
    argv = [STAGER, "run", *options, "--", "-m", "trainer", "tiny-bert", *training]
    done = run([*entering("-n", ALONE), *argv], cwd=work, env=torch_project.env, seconds=1200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 4
    metrics = json.loads((work / "out" / "metrics.json").read_text())
    assert metrics["accuracy"] >= 0.80
    assert (metrics["world_size"], metrics["epochs"]) == (4, 3)
    assert metrics["samples_per_second"] > 0
    assert metrics["loss"] > 0
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.out"))
    for rank in range(4):
        assert logs.count(f"[RANK {rank}] WORLD_SIZE=4") == 1
    assert [path.name for path in work.iterdir()] == ["out"]
