"""Secrets in a real job on this machine: what its ranks get, what it leaves, who may read it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.building import Project
from tests.support.small_torch import with_small_torch
from tests.support.users import umask

SECRETS = {
    "GH_TOKEN": "ghtokenhush",
    "AWS_SECRET_ACCESS_KEY": "awssecrethush",
    "MYPASS": "mypasshush",
    "KEY": "keyhush",
    "SESSION_COOKIE": "cookiehush",
}
PLAIN = {"TOKENIZERS_PARALLELISM": "false", "PASSTHROUGH": "plain", "KEYBOARD": "plain"}
ARGUMENTS = [
    *("--password", "optionhush", "--api-key=assignedhush", "KEY=namedhush"),
    *("--proxy", "http://u:urlhush@h/?sig=queryhush"),
]
TRAIN = """\
import json, os, sys
if os.environ["RANK"] == "0":
    with open("seen.json", "w") as out:
        json.dump({"env": dict(os.environ), "argv": sys.argv[1:]}, out)
print("[RANK", os.environ["RANK"] + "] ran")
"""


@pytest.fixture
def ready(project: Project) -> Project:
    """A project whose one rank notes what it was given."""
    return with_small_torch(project, TRAIN)


def ran(
    project: Project, logs: Path, *options: str, env: Mapping[str, str] = SECRETS
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """What the rank noted, and what was said."""
    argv = ["run", "--allocation", "local", "-v", "--log-dir", str(logs), *options]
    done = project.expect(*argv, "--", "train.py", *ARGUMENTS, env={**env, **PLAIN})
    return json.loads((project.root / "seen.json").read_text()), done


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def hushed(text: str) -> list[str]:
    return [word for word in text.replace('"', " ").split() if "hush" in word]


def test_a_local_rank_gets_no_secret_that_is_not_named(ready: Project, tmp_path: Path) -> None:
    """It gets its arguments as they are; what is kept and shown of them has no secret."""
    logs = tmp_path / "new" / "logs"
    with umask(0):
        seen, done = ran(ready, logs, "--pass-env", "MYPASS")
    assert seen["argv"] == ARGUMENTS
    got = {name: value for name, value in seen["env"].items() if "hush" in value}
    assert got == {"MYPASS": SECRETS["MYPASS"]}
    assert {name: seen["env"][name] for name in PLAIN} == PLAIN
    assert hushed(done.stdout + done.stderr) == []
    (told,) = [line for line in done.stderr.splitlines() if "not given to the ranks" in line]
    assert set(SECRETS) - {"MYPASS"} <= set(re.findall(r"\w+", told))
    assert "MYPASS" not in told
    again, _ = ran(ready, tmp_path / "again")  # by a launcher that was started early
    assert not [name for name, value in again["env"].items() if "hush" in value]

    kept = {path.name: path.read_text() for path in logs.iterdir()}
    expected = {"events", "job", "order", "preflight", "run_wrapper", ready.root.name}
    assert {name.partition(".")[0] for name in kept} - {""} == expected
    assert not [name for name, text in kept.items() if hushed(text)]
    (job,) = [json.loads(text) for name, text in kept.items() if name.startswith("job.")]
    assert job["launch"]["command"] == [
        *("train.py", "--password", "***", "--api-key=***", "KEY=***"),
        *("--proxy", "http://h/?sig=***"),
    ]
    (events,) = [text for name, text in kept.items() if name.startswith("events.")]
    (started,) = [line for line in events.splitlines() if '"started"' in line]
    assert "--api-key=***" in started

    files = modes(logs)
    assert ".gitignore" in files
    assert set(files.values()) == {0o600}, files
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700
    assert stat.S_IMODE(logs.parent.stat().st_mode) == 0o700
    own = Path(os.environ["STAGER_NODE_ROOT"], f"stager-{os.geteuid()}")
    (inner,) = own.glob("nodes/*/stager-*")
    for folder in (own, own / "nodes", inner.parent, inner):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder

    with umask(0):
        made = ready.stager("report", "--log-dir", str(logs), env=SECRETS)
    page = Path(made.stdout.strip())
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert hushed(page.read_text()) == []
    assert "http://h/?sig=***" in page.read_text()


def test_a_group_reads_the_logs_where_it_is_asked_for(ready: Project, tmp_path: Path) -> None:
    settings = ready.root / "stager.toml"
    settings.write_text(settings.read_text() + '\n[cluster]\nlog-mode = "group"\n')
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o2775)  # the user's own choice stays
    if os.geteuid() == 0:
        os.chown(logs, -1, 12345)
    group = logs.stat().st_gid
    with umask(0o077):
        ran(ready, logs)
        made = ready.stager("report", "--log-dir", str(logs))
    assert made.returncode == 0, made.stderr
    assert stat.S_IMODE(logs.stat().st_mode) == 0o2775
    files = list(logs.iterdir())
    assert logs / ".gitignore" in files
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    assert {path.stat().st_gid for path in files} == {group}


def test_a_rank_that_misses_a_withheld_secret_is_told_so(ready: Project, tmp_path: Path) -> None:
    logs = str(tmp_path / "logs")
    (ready.root / "train.py").write_text('import os\nprint(os.environ["GH_TOKEN"])\n')

    def failed(*options: str, env: Mapping[str, str]) -> dict[str, Any]:
        argv = ["run", "--allocation", "local", "--log-dir", logs, *options, "--", "train.py"]
        done = ready.expect(*argv, code=3, env=env)
        told = ready.stager("diagnose", "--json", "--log-dir", logs, env=env)
        found: dict[str, Any] = json.loads(told.stdout)["first_failure"]
        assert found["cause"] == "KeyError: 'GH_TOKEN'"
        assert f"hint: {found['hint']}" in done.stderr
        return found

    found = failed(env=SECRETS)
    assert found["meaning"].startswith("GH_TOKEN was withheld from the ranks")
    assert "--pass-env GH_TOKEN" in found["hint"]
    found = failed("--pass-env", "GH_TOKEN", env={})
    assert "was not set where the job was started" in found["meaning"]
    (ready.root / "train.py").write_text('print({}["GH_TOKEN"])\n')
    assert "withheld" not in failed(env=SECRETS)["meaning"]


def test_exec_is_the_users_own_shell(ready: Project) -> None:
    code = "import os; print(os.environ['GH_TOKEN'])"
    done = ready.stager("exec", "-q", "--", "python", "-c", code, env=SECRETS)
    assert done.stdout == f"{SECRETS['GH_TOKEN']}\n", done.stderr


def test_a_command_that_is_refused_shows_no_secret(ready: Project) -> None:
    done = ready.expect("run", "--allocation", "local", "--", "--epochs", "3", *ARGUMENTS, code=1)
    assert hushed(done.stdout + done.stderr) == []
