"""The batch script: whole golden files, what goes into them, and what bash makes of them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.enumerations import Action, LogMode
from bundle.protocol.job import Job
from stager.core.errors import ConfigError
from stager.slurm.batch_script import batch_script, make_submit_argv, make_submit_environment
from tests.support.batch_scripts import EXAMPLES, FACTS, JOB, asking, driver
from tests.support.golden import check_golden
from tests.support.jobs import LAUNCH
from tests.support.namespaces import entering

REPO = Path(__file__).resolve().parents[3]

VERIFIED = {"account": "lab", "cpus_per_task": None, "gpus_per_node": "a100:4"}
ODD = replace(LAUNCH, command=("-m", "a\nb", "it's"), nproc_per_node=None)
SETTINGS = {
    "run": asking(FACTS, partition="torch", time="00:30:00", exclude="node[02,05]"),
    "verify": replace(
        asking(FACTS, nodes=(2, 4), **VERIFIED,
               salloc_args=("--mem=8G", "--comment", 'a "b" \\c # d')),
        job=replace(JOB, action=Action.VERIFY, deep=True, cpus_per_task=None),
        made_with="stager script --nodes 2:4",
    ),
    "requeue": replace(asking(FACTS, nodes=(1, 1)), requeue=True, embed=False,
                       job=replace(JOB, launch=ODD)),
}  # fmt: skip


START, END = "    base64 -d <<'END_OF_PROGRAM' | gzip -d\n", "END_OF_PROGRAM\n"


@pytest.mark.parametrize("name", SETTINGS)
def test_golden(name: str) -> None:
    """The whole script. After a wanted change run this file with WRITE_GOLDEN=1."""
    text = batch_script(SETTINGS[name])
    if SETTINGS[name].embed:  # its bytes depend on the zlib at hand
        before, _, rest = text.partition(START)
        text = f"{before}{START}@BASE64@\n{END}{rest.partition(END)[2]}"
    check_golden(f"{name}.sbatch", text)
    assert max(len(line) for line in text.splitlines() if not line.startswith(("#", " "))) < 100


def test_the_examples_are_what_the_script_says_today(tmp_path: Path) -> None:
    generator = REPO / "scripts" / "examples.py"
    folder = tmp_path / "examples"
    folder.mkdir()
    subprocess.run([sys.executable, str(generator), str(folder)], check=True, timeout=300)
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(written) == sorted(f"{name}.sbatch" for name in EXAMPLES)
    for name, text in written.items():
        kept = (REPO / "docs" / "examples" / name).read_text()
        assert text == kept, f"run python scripts/examples.py; {name} is behind"


def test_the_job_in_the_script_is_the_job() -> None:
    facts = SETTINGS["requeue"]
    text = batch_script(facts)
    described = text.partition("<<'END_OF_JOB'\n")[2].partition("\nEND_OF_JOB\n")[0]
    assert Job.from_json(json.loads(described)) == facts.job
    assert described.isascii()
    # A command may hold line breaks; in the comment it shows them.
    assert "#   command  -m 'a\\nb' 'it'\"'\"'s'\n" in text
    assert "\nb'" not in text
    # The signal comes the earlier, the longer ranks save.
    patient = replace(facts.job, launch=replace(facts.job.launch, grace_seconds=300))
    text = batch_script(replace(facts, job=patient))
    assert "#SBATCH --signal=B:USR1@383\n" in text
    assert "# 383 s before the time limit" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", "a\n#SBATCH --uid=0"),
        ("time", "1:00\r"),
        ("exclude", "n1\x00"),
        ("account", "x\u2028y"),
        ("salloc_args", ("--mem=1G", "--comment=a\nb")),
        ("gpus_per_node", "4\n"),
    ],
)
def test_values_that_cannot_stand_in_a_directive(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{key.replace('_', '-')}"):
        batch_script(asking(FACTS, **{key: value}))


def test_submitting() -> None:
    always = ["sbatch", "--parsable", "--export=ALL"]
    assert make_submit_argv(FACTS) == always
    set_all = asking(FACTS, partition="p", account="a", time="10", exclude="n1")
    assert make_submit_argv(set_all) == [*always, "--partition=p", "--account=a", "--time=10"]
    with pytest.raises(ConfigError, match="partition"):
        make_submit_argv(asking(FACTS, partition="a\nb"))


OWN = {"PATH": "/bin", "LANG": "C", "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
SITE = {"SBATCH_ACCOUNT": "lab", "SALLOC_PARTITION": "p", "SLURM_CONF": "/c", "SLURM_JWT": "t"}
RANK = dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMI_RANK"), "1")
HEADERS = {"SBATCH_OUTPUT": "x", "SBATCH_EXPORT": "NONE", "SBATCH_NO_REQUEUE": "1"}
ENCLOSING = dict.fromkeys(("SLURM_JOB_ID", "SLURM_NNODES", "SRUN_DEBUG", "SLURMD_NODENAME"), "3")
SECRETS = {"HF_TOKEN": "hf", "WANDB_API_KEY": "w", "DB_PASSWORD": "p"}


@pytest.mark.parametrize(
    ("more", "pass_env", "kept"),
    [
        ({**SITE, **RANK, **HEADERS}, (), SITE),
        ({**SITE, **ENCLOSING}, (), {name: SITE[name] for name in ("SLURM_CONF", "SLURM_JWT")}),
        (SECRETS, (), {}),
        (SECRETS, ("HF_TOKEN",), {"HF_TOKEN": "hf"}),
    ],
)
def test_the_environment_of_a_new_job(
    more: dict[str, str], pass_env: tuple[str, ...], kept: dict[str, str]
) -> None:
    assert make_submit_environment({**OWN, **more}, pass_env) == {**OWN, **kept}


# --- run by bash ------------------------------------------------------------------------------


def script(folder: Path, **changed: Any) -> Path:
    """A batch script in a folder, for any Python that is there."""
    job = replace(JOB, python_hints=(sys.executable,), log_dir=str(folder))
    made = replace(FACTS, **{"program": driver(), "job": job, **changed})
    path = folder / "job.sbatch"
    path.write_text(batch_script(made), encoding="utf-8")
    return path


def make_env(tmp: Path, variables: dict[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "TMPDIR": str(tmp), **variables}


def run(command: list[str], tmp: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = make_env(tmp, variables)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@contextmanager
def waiting(path: Path, tmp: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A batch script whose driver runs, and waits for a signal."""
    env, pipe = make_env(tmp, {"DRIVER_WAITS": "1", **variables}), subprocess.PIPE
    argv = ["bash", str(path)]
    with subprocess.Popen(argv, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        while not (line := process.stdout.readline()).startswith("driver"):
            assert line
        yield process


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    """A temporary directory of the node's."""
    folder = tmp_path / "node tmp"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("code", [0, 3, 130])
def test_the_exit_status_is_the_drivers(tmp_path: Path, tmp: Path, code: int) -> None:
    for requeue in (False, True):
        path = script(tmp_path, requeue=requeue)
        done = run(["bash", str(path)], tmp, DRIVER_CODE=str(code), SLURM_JOB_ID="12")
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout.startswith("stager: job 12 restart 0 on ?: driver on ")
        assert f"\ndriver {tmp}/stager-batch." in done.stdout
        assert list(tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "received"),
    [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGUSR2", "SIGUSR2")],
)
def test_signals_reach_the_driver(tmp_path: Path, tmp: Path, name: str, received: str) -> None:
    """Those that end a job end the driver; it passes the others on to the ranks."""
    with waiting(script(tmp_path), tmp) as process:
        process.send_signal(getattr(signal, name))
        time.sleep(0.05)
        # A second one does not end the wait for the first.
        process.send_signal(getattr(signal, name))
        out, _ = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, f"signal {received}\n")
    assert list(tmp.iterdir()) == []


def test_a_job_that_slurm_does_not_queue_again_fails(tmp_path: Path, tmp: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    scontrol.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with waiting(script(tmp_path, requeue=True), tmp, PATH=path, SLURM_JOB_ID="12") as process:
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 3
    assert errors.endswith(": Slurm did not queue the job again\n")


def test_a_program_that_was_changed(tmp_path: Path, tmp: Path) -> None:
    path = script(tmp_path)
    before, begin, rest = path.read_text().partition(START)
    wrong = base64.b64encode(gzip.compress(driver() + b"#")).decode() + "\n"
    path.write_text(before + begin + wrong + END + rest.partition(END)[2])
    done = run(["bash", str(path)], tmp)
    assert done.returncode == 3
    assert "the program is damaged" in done.stderr
    assert "driver" not in done.stdout
    assert list(tmp.iterdir()) == []


def test_a_script_that_was_cut_short(tmp_path: Path, tmp: Path) -> None:
    """What does anything is its last line."""
    path = script(tmp_path)
    whole = path.read_text()
    for part in (0.3, 0.6, 0.9):
        path.write_text(whole[: int(len(whole) * part)])
        done = run(["bash", str(path)], tmp)
        assert "driver" not in done.stdout
        assert list(tmp.iterdir()) == []


def test_the_program_out_of_the_bundle(tmp_path: Path, tmp: Path) -> None:
    bundle, manifest = tmp_path / "the bundle.tar", tmp_path / "manifest.json"
    bundle_id = hashlib.sha256(b'{"format":3,"name":"demo"}').hexdigest()
    manifest.write_text(f'{{"format":3,"id":"{bundle_id}","name":"demo"}}')
    job = replace(JOB, bundle=str(bundle), bundle_id=bundle_id)
    path = script(tmp_path, embed=False, job=job)
    done = run(["bash", str(path)], tmp)
    assert done.returncode == 3
    assert f"{bundle} cannot be read from this node" in done.stderr
    assert "without --batch" in done.stderr

    (tmp_path / "node.pyz").write_bytes(driver())
    with tarfile.open(bundle, "w") as archive:
        for name in ("manifest.json", "node.pyz"):
            archive.add(tmp_path / name, name)
    done = run(["bash", str(path)], tmp)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\ndriver " in done.stdout


def test_a_full_temporary_directory_is_passed_over(tmp_path: Path) -> None:
    """The shell's own here-document goes to the place that has room, too."""
    path = script(tmp_path, program=driver(os.urandom(200_000)))
    full, small = tmp_path / "full", tmp_path / "small"
    shell = f"mkdir {full} {small}"
    shell += "".join(f"; mount -t tmpfs -o size=128k none {folder}" for folder in (full, small))
    shell += f"; head -c 128k /dev/zero >{full}/zeros"
    command = [*entering("-m", shell), "bash", str(path)]
    done = run(command, full, SLURM_TMPDIR=str(small))
    assert done.returncode == 0, done.stderr
    assert "\ndriver /tmp/stager-batch." in done.stdout
    assert "No space left on device" in done.stderr


def test_no_python(tmp_path: Path, tmp: Path) -> None:
    """None of the names is there, nor in the usual places; one that is too old does not count."""
    empty, node = tmp_path / "bin", os.uname().nodename
    empty.mkdir()
    for name in ("mktemp", "base64", "gzip", "sha256sum", "rm", "uname", "cat"):
        (empty / name).symlink_to(f"/usr/bin/{name}")
    old = empty / "python3"
    old.write_text("#!/bin/bash\nexit 1\n")  # as an older Python answers
    old.chmod(0o755)
    path = script(tmp_path, job=replace(JOB, python_hints=("/no/such/python3.11",)))
    usual = "/usr/bin/python3 /usr/local/bin/python3 /opt/*/bin/python3"
    assert usual in path.read_text()
    path.write_text(path.read_text().replace(usual, ""))
    done = run(["/bin/bash", str(path)], tmp, PATH=str(empty))
    assert done.returncode == 3
    assert done.stderr.startswith(f"stager: {node}: no Python 3.9 or newer was found")
    assert "/no/such/python3.11 python3" in done.stderr
    assert f"--exclude={node}" in done.stderr
    assert list(tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "bits", "folder_bits"),
    [(LogMode.PRIVATE, 0o600, 0o700), (LogMode.GROUP, 0o640, 0o750)],
)
def test_the_log_is_for_those_who_may_read_it(
    tmp_path: Path, mode: LogMode, bits: int, folder_bits: int
) -> None:
    """Whatever the umask, which the ranks keep."""
    logs = tmp_path / "new" / "logs"
    job = replace(JOB, log_dir=str(logs), log_mode=mode)
    before_main = batch_script(replace(FACTS, job=job)).removesuffix("main\n")
    program = f"umask 002\n{before_main}\nopen_log\numask"
    for _ in range(2):  # the second time as after a requeue
        subprocess.run(
            ["bash", "-c", program],
            env={**os.environ, "SLURM_JOB_ID": "7"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    log = logs / "demo.7.batch.out"
    assert log.read_text() == "0002\n0002\n"
    assert log.stat().st_mode & 0o7777 == bits
    assert logs.stat().st_mode & 0o7777 == folder_bits
    assert log.stat().st_gid == logs.stat().st_gid
