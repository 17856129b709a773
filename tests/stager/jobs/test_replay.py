"""A failed rank again, on this machine: which one, with what, and the comparison of its failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bundle.launch.program_variables import USE_CPU
from bundle.results.patterns import is_wanted
from stager.core.errors import StagerError
from stager.jobs import replay
from stager.jobs.replay import ReplayedRank, choose_rank, list_differences
from stager.logs.job_files import JobFiles
from tests.support.building import STAGER, Project
from tests.support.processes import living, start
from tests.support.stories import T0, Told, went_well

NODES = ["node01", "node02"]
RAISED = {
    "node": "node02",
    "rank": 3,
    "local_rank": 1,
    "exit_code": 1,
    "exception": "ValueError",
    "message": "bad shard",
    "lines": ["Traceback (most recent call last):", '  File "/p/train.py", line 12, in main'],
    "time": T0,
}
KILLED = {**RAISED, "exit_code": -9, "exception": "", "message": "", "lines": []}


def failed(folder: Path, record: dict[str, Any] = RAISED, **job: Any) -> JobFiles:
    codes = {"node01": 0, "node02": 1}
    told = went_well(folder, NODES, ok=False, failures=[record], exit_codes=codes)
    return told.write(**job)


def chosen(files: JobFiles, rank: int | None = None, **more: bool) -> ReplayedRank:
    return choose_rank(files, rank, is_forced=more.get("is_forced", False))


def refused(files: JobFiles, rank: int | None = None) -> str:
    with pytest.raises(StagerError) as raised:
        choose_rank(files, rank, is_forced=False)
    return f"{raised.value.message}; {raised.value.hint}"


def test_the_rank_that_failed_first_is_chosen_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "kernel_driver", lambda: "")
    launch = {"command": ["train.py"], "launcher": "torchrun", "omp_num_threads": 3}
    found = chosen(failed(tmp_path, launch=launch))
    assert (found.rank, found.world_size, found.ranks_here) == (3, 4, 2)
    variables = replay.make_variables(found)
    wanted = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    wanted |= {"GROUP_RANK": "1", "OMP_NUM_THREADS": "3", "STAGER_NODE": "node02"}
    wanted |= {"PYTORCH_DIST_BACKEND": "gloo", USE_CPU: "true", "TORCHELASTIC_RUN_ID": "77.0"}
    assert wanted.items() <= variables.items()

    other = chosen(failed(tmp_path), 2)
    assert (other.rank, other.failure) == (2, None)
    assert replay.make_variables(other)["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    ("job", "rank", "why"),
    [
        ({}, 4, "--rank 4: job 77 had 4 ranks; the last of them is --rank 3"),
        ({"action": "verify"}, None, "job 77 was a verify: it started no ranks"),
        ({"dry_run": True}, None, "job 77 was a dry run of run: it started no ranks"),
        ({"launch": {"command": []}}, None, "job 77 has left no command, or"),
    ],
)
def test_a_job_without_such_a_rank(
    tmp_path: Path, job: dict[str, Any], rank: int | None, why: str
) -> None:
    assert why in refused(failed(tmp_path, **job), rank)


def test_jobs_that_did_not_fail_or_run_or_are_not_ours(tmp_path: Path) -> None:
    well = went_well(tmp_path / "well", NODES).write()
    assert "job 77 has not failed; --rank N chooses" in refused(well)
    assert chosen(well, 1).rank == 1

    begun = Told(tmp_path / "begun").say("job", nodes=NODES)
    assert "ended before its ranks were started" in refused(begun.write())
    running = begun.say("begin", phase="launch").write()
    assert "job 77 has not ended, as far as its files tell" in refused(running, 0)
    assert chosen(running, 0, is_forced=True).rank == 0

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "slurm-12.out").write_text("text\n")
    found = JobFiles(folder=foreign, job_id="")
    assert "not those of a job of stager's" in refused(found)


def test_failures_that_no_rank_has_by_itself_need_a_word(tmp_path: Path) -> None:
    files = failed(tmp_path, KILLED)
    assert "a replay shows nothing of this failure (killed)" in refused(files)
    assert chosen(files, is_forced=True).rank == 3
    assert chosen(files, 2).rank == 2
    assert chosen(failed(tmp_path, {**KILLED, "exit_code": -11})).rank == 3


def test_differences_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "kernel_driver", lambda: "")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    launch: dict[str, Any] = {"command": ["train.py", "--token", "***"], "pass_env": ["HF_TOKEN"]}
    launch |= {"container_image": "torch.sif"}
    files = failed(tmp_path, launch=launch)
    gpus = {"gpus": [{"name": "H100"}], "driver": "570"}
    line = json.dumps({"v": 1, "event": "preflight", "node": "node01", "ok": True, "gpus": gpus})
    text = files.events.read_text().split("\n", 1)
    files.events.write_text(f"{text[0]}\n{line}\n{text[1]}")
    said = "\n".join(list_differences(chosen(files)))
    for words in (
        "from the first collective operation on, values are not those of the job",
        "the rank had HF_TOKEN, which is not set here",
        "a secret in its arguments was not kept: the program gets ***",
        "its ranks ran in torch.sif; this one runs without a container",
        "the job had GPUs, and this machine has none",
    ):
        assert words in said


def test_secrets_and_other_ranks_stay_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SLURM_PROCID", "RANK", "MASTER_ADDR", "LANG"):
        monkeypatch.setenv(name, "x")
    launch = {"command": ["train.py"], "pass_env": ["HF_TOKEN"]}
    base = replay._make_base(failed(tmp_path, launch=launch).read_job())
    names = {"HF_TOKEN", "WANDB_API_KEY", "SLURM_PROCID", "RANK", "MASTER_ADDR", "LANG"}
    assert names & set(base) == {"HF_TOKEN", "LANG"}


def test_the_working_directory_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was there before the job; the project's own files follow from the bundle."""
    source, target = tmp_path / "run", tmp_path / "work"
    files = {"data/a.csv": "1", "train.py": "new", "helper.py": "h", "out/model.txt": "m"}
    files |= {"big.npy": "x" * 200, "big.pt": "x" * 200, ".git/config": "g", "env/pyvenv.cfg": ""}
    for name, text in {**files, "late.txt": "l", "metrics.csv": "m"}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    (source / "link").symlink_to("data")
    begun = time.time() - 50
    for name in files:
        os.utime(source / name, (begun - 50, begun - 50))
    os.utime(source / "helper.py")
    os.utime(source / "link", (begun - 50, begun - 50), follow_symlinks=False)
    monkeypatch.setattr(replay, "_COPIED_BYTES", 100)

    def is_copied(path: str) -> bool:
        return path != "train.py" and not is_wanted(path, ("out", *replay._SKIPPED))

    made = replay.copy_run_dir(source, target, begun, is_copied)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    assert found == {"data/a.csv", "helper.py", "big.npy", "late.txt"}
    assert (target / "link").is_symlink()
    assert (target / "link").resolve() == source / "data"
    assert (target / "big.npy").is_symlink()
    assert {what: sorted(names) for what, names in made.items()} == {
        replay._CHANGED: ["helper.py"],
        replay._LINKED: ["big.npy"],
        replay._LEFT_OUT: ["big.pt"],
    }
    monkeypatch.setattr(replay, "_COPIED_BYTES", 10_000)
    monkeypatch.setattr(replay, "_MOST_FILES", 1)
    few = replay.copy_run_dir(source, tmp_path / "few", begun, lambda _: True)
    assert [len(names) for names in few.values()] == [1]


def test_a_working_directory_below_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1")
    os.utime(tmp_path / "a.csv", (T0, T0))
    (tmp_path / "tmp").mkdir()
    assert replay.copy_run_dir(tmp_path, tmp_path / "tmp" / "work", T0 + 1, lambda _: True) == {}
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.csv")}
    assert files == {"a.csv", "tmp/work/a.csv"}


PROGRAM = """\
import os, sys
from pathlib import Path

def check(rows):
    raise ValueError(f"row {rows} of {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")

Path("written").write_text("x")
if Path("data.csv").exists() and os.environ["RANK"] == "1":
    check(int(Path("data.csv").read_text()))
print("did not fail", sys.stdin.read())
"""


def test_a_real_job_without_torch(project: Project, tmp_path: Path) -> None:
    """With its bundle, also when the project has changed; what it writes is not the job's."""
    here = {"TMPDIR": str(tmp_path)}
    (project.root / "train.py").write_text(PROGRAM)
    (project.root / ".gitignore").write_text("data.csv\nwritten\nlogs/\n")
    (project.root / "data.csv").write_text("7")
    project.settings("alpha").build()
    options = ("--allocation", "local", "--nproc-per-node", "2", "--launcher", "processes")
    run = ("run", *options, "--log-dir", "logs", "--", "train.py")
    assert project.stager(*run).returncode == 3
    (project.root / "train.py").write_text("print('another program')\n")
    os.utime(project.root / "written", (T0, T0))
    failed_job = project.stager("replay", "--log-dir", "logs", env=here)
    assert failed_job.returncode == 1, failed_job.stderr
    assert "ValueError: row 7 of 1 of 2" in failed_job.stderr
    assert "replay: the same failure: ValueError at train.py:5" in failed_job.stderr
    assert (project.root / "written").stat().st_mtime == T0
    kept = failed_job.stderr.split("what it has written: ")[1].strip()
    assert (Path(kept) / "written").read_text() == "x"
    assert Path(kept).is_relative_to(tmp_path)

    found = project.stager("diagnose", "--log-dir", "logs").stdout
    assert "its variables at project/train.py:5 check:" in found
    assert "  | rows: int 7" in found

    well = project.stager("replay", "--rank", "0", "--json", "--log-dir", "logs", env=here)
    assert well.returncode == 0, well.stderr
    said = json.loads(well.stdout)
    assert (said["same"], said["failure"]) == (None, "")
    assert "did not fail" in well.stderr

    debugged = project.stager("replay", "--pdb", "--log-dir", "logs")
    assert debugged.returncode == 1
    assert "--pdb: the debugger needs a terminal" in debugged.stderr
    for bundle in project.store.root.glob("bundles/*"):
        bundle.unlink()
    gone = project.stager("replay", "--log-dir", "logs")
    assert gone.returncode == 1
    assert "the bundle of the job is no longer there" in gone.stderr
    assert "stager import" in gone.stderr


ENDLESS = """\
import time
from pathlib import Path

if Path("endless.txt").exists():
    print("begun", flush=True)
    time.sleep(60)
raise ValueError
"""


def test_an_interrupted_replay_leaves_nothing_behind(project: Project, tmp_path: Path) -> None:
    """By Ctrl-C, which reaches the program, too, and by a signal to the command alone."""
    (project.root / "train.py").write_text(ENDLESS)
    project.settings("alpha").build()
    options = ("--allocation", "local", "--nproc-per-node", "1", "--launcher", "processes")
    run = ("run", *options, "--log-dir", str(tmp_path / "logs"), "--", "train.py")
    assert project.stager(*run).returncode == 3
    (project.root / "endless.txt").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    argv = [*STAGER, "replay", "--log-dir", tmp_path / "logs"]
    for number, interrupt in ((signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)):
        with start(argv, cwd=project.root, env={**os.environ, "TMPDIR": str(temporary)}) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == "begun\n"
            assert list(temporary.iterdir())
            interrupt(running.pid, number)
            assert running.wait(30) == 128 + number
        assert not list(temporary.iterdir())
        assert not living(temporary)


PLAY = """\
import datetime, os, sys
sys.path.insert(0, sys.argv[1])
os.environ.update(RANK="1", WORLD_SIZE="4")
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from stager_rank import fake_process_groups
fake_process_groups(dist.distributed_c10d)
dist.init_process_group = dist.distributed_c10d.init_process_group
for name in ("new_group", "split_group", "monitored_barrier", "broadcast_object_list"):
    setattr(dist, name, getattr(dist.distributed_c10d, name))
dist.scatter_object_list = dist.distributed_c10d.scatter_object_list
dist.init_process_group("nccl", "env://", datetime.timedelta(seconds=5))
assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
x = torch.full((3,), 5.0)
dist.all_reduce(x); dist.broadcast(x, 0); dist.reduce(x, 0); dist.barrier()
assert x.tolist() == [5.0] * 3
parts = [torch.zeros(3) for _ in range(4)]
dist.all_gather(parts, x)
every = [None] * 4
dist.all_gather_object(every, {"a": 1})
assert every == [{"a": 1}] * 4
objects = [1, 2]
dist.broadcast_object_list(objects, 0)
got = [None]
dist.scatter_object_list(got, [0, 1, 2, 3] if dist.get_rank() == 0 else None)
dist.monitored_barrier()
group = dist.new_group([0, 1], backend="gloo")
dist.all_reduce(x, group=group)
dist.split_group(split_ranks=[[0, 1], [2, 3]])
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
dist.all_reduce(x, group=mesh["b"].get_group())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model.register_comm_hook(None, lambda state, bucket: None)
model(torch.ones(2, 3)).sum().backward()
assert model.module.weight.grad.tolist() == [[2.0] * 3]
dist.destroy_process_group()
print("played")
"""


def test_one_process_plays_a_rank_of_four(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = Path(replay.__file__).with_name("replayed_rank.py").read_text()
    (tmp_path / "stager_rank.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAY, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.endswith("played\n"), done.stderr
