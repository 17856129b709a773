"""``stager support``: a real job with secrets in every place, and none of them in the archive."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import stat
import subprocess
import tarfile
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stager.core.store import Store
from stager.logs.job_files import find_job_files, list_job_files
from stager.support.archive import SupportOptions, make_support_archive
from tests.support.building import STAGER, Project
from tests.support.small_torch import TORCH
from tests.support.stacks import job_stacks, write_stacks
from tests.support.wheelhouse import make_wheel

PEM_BODY = "".join(f"{base64.b64encode(bytes(range(n, n + 48))).decode()}\n" for n in (7, 60, 113))
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{PEM_BODY}-----END RSA PRIVATE KEY-----"
JWT = ".".join(("eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiJhbGljZSIsImlhdCI6MTV9", "c2lnbmF0dXJlLW9mLWl0"))
ENVIRONMENT = {
    "HF_TOKEN": "hf_qWcXvBnMlKjHgFdSaPoIuYtReW12345678",
    "SITE_CODE": "sesame-street-open-77",
    "WANDB_API_KEY": "4f3c2b1a0d9e8f7c6b5a4d3e2f1a0b9c8d7e6f5a",
    "DB_PASSWORD": 'Tr0ub4dor&3 "horse" \\staple',
    "PIP_EXTRA_INDEX_URL": "https://builder:Ind3xPassw0rdQ@mirror.site.example/simple",
}
IN_SETTINGS = {
    "key": "Zx81Settings9KeyValue",
    "password": "plain-words-in-toml",
    "url": "T0mlInd3xSecret55",
}
SPOKEN = {
    "env-dump": "Dump3dByEnv0nALine",
    "json": "Js0nV4lueOfAToken",
    "escaped": 'Esc4ped"With"Quotes99',
    "repr": "R3prOfADictionary1",
    "header": "B34rerOfAHeader00",
    "url": "Qu3ryOfAnUrl12345",
    "signature": "S1gnatureInAnUrl%2B77",
    "login": "P4ssw0rdInAnUrl/x",
    "option": "0ptionOfACommand5",
    "printed": "Pr1ntedInTwoCalls8",
    "cookie": "C00kieOfASession42",
    "yaml": "Y4mlOnTheNextLine6",
    "netrc": "N3trcHasNoSigns33",
    "raised": "R41sedInAnException",
    "github": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "gitlab": "glpat-XyZ12345abcdeFGHIJkl",
    "slack": "xoxb-123456789012-abcdefABCDEF",
    "openai": "sk-proj-abcDEF123456ghiJKL789012",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "pypi": "pypi-AgEIcHlwaS5vcmcCJDU2MTdjZWVhLTU0YmItNDU",
    "npm": "npm_1234567890abcdefABCDEF1234567890abcd",
    "munge": "AwQFAABbK8mVx9QzNfT2LpR7sYcE4uWj",
}
IN_FILES = {
    "event": "Ev3ntLogHasOneToo2",
    "batch": "B4tchLogHasOneToo1",
    "order": "0rderHasOneAsWell9",
    "job-name": "ghp_JobNamesAreFileNames00112233445566",
}
TRAIN = """\
import base64, json, logging, os, sys, time, urllib.parse
said = json.loads(open({spoken!r}).read())
own, pem, jwt = os.environ["HF_TOKEN"], said.pop("pem"), said.pop("jwt")
code = os.environ["SITE_CODE"]
print("[RANK", os.environ["RANK"] + "]", "tokens/s 1234.5 num_tokens: 5 max_tokens=512", flush=True)
print("TOKENIZERS_PARALLELISM=false", "pad_token='<pad>'", "loss 0.25")
print("got arguments:", *sys.argv[1:])
print("own token", own, "and code", code)
print(base64.b64encode(b"x" + own.encode()).decode(), base64.b64encode(code.encode()).decode())
print(urllib.parse.quote("hello " + code, safe=""), urllib.parse.quote(own))
print("".join("%" + format(byte, "02X") for byte in own.encode()))
print("\\n".join(own))
print(list(own), own.encode().hex())
print(own[:17], end="")
time.sleep(0.2)
print(own[17:])
print(own[:17])
print(own[17:])
for piece in (own[:18], own[18:]):
    logging.warning("a piece: %s", piece)
print("MY_SECRET=" + said["env-dump"])
print(json.dumps({{"access_token": said["json"], "expires_in": 3600}}))
print(json.dumps(json.dumps({{"line": json.dumps({{"client_secret": said["escaped"]}})}})))
print({{"api_key": said["repr"], "n": 1}})
print("> Authorization: Bearer", said["header"])
print("GET https://h.example/x?a=1&token=" + said["url"] + "&sig=" + said["signature"])
print("cloning https://alice:" + said["login"] + "@git.example/x.git")
print("+ python tool.py --auth-token", said["option"], "--epochs 3")
print("password=", end="", flush=True)
print(said["printed"])
print("Cookie: session=" + said["cookie"] + "; theme=dark")
print("api_key:")
print("  " + said["yaml"])
print("machine h.example login alice password", said["netrc"])
print("\\x1b[32mtoken\\x1b[0m: \\x1b[1m" + said["json"] + "\\x1b[0m")
print("credential MUNGE:" + said["munge"] + ":")
for name in ("github", "gitlab", "slack", "openai", "aws", "pypi", "npm"):
    print("found", said[name], "here")
print(pem)
print(json.dumps({{"key": pem}}), repr(pem))
print("jwt", jwt)
sys.stdout.buffer.write(b"\\xff\\xfe\\x00\\x01 garbage \\x00\\n")
sys.stdout.flush()
print(("HF_TOKEN=" + said["json"]).encode("utf-16").decode("latin-1"))
sys.stdout.flush()
raise RuntimeError(f"login failed, token={{said['raised']}} at https://bob:{{said['login']}}@h/")
"""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A job that was run with secrets everywhere."""

    project: Project
    logs: Path
    job_id: str
    name: str

    @property
    def secrets(self) -> dict[str, str]:
        """Every secret by the place where it is."""
        found = {**ENVIRONMENT, **IN_SETTINGS, **SPOKEN, **IN_FILES, "jwt": JWT}
        found["PIP_EXTRA_INDEX_URL"] = "Ind3xPassw0rdQ"
        return found | {f"pem {n}": line for n, line in enumerate(PEM_BODY.splitlines())}

    def stager(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line, with the secrets in its environment."""
        return self.project.stager(*arguments, env=ENVIRONMENT)


@pytest.fixture
def planted(project: Project, wheelhouse: Path) -> Planted:
    """Run the job for real: two ranks that print secrets, and fail with one."""
    make_wheel(wheelhouse, "torch", "2.13.0", files=TORCH)
    name = IN_FILES["job-name"]
    spoken = project.root.parent / "spoken.json"
    spoken.write_text(json.dumps({**SPOKEN, "pem": PEM, "jwt": JWT}))
    (project.root / "train.py").write_text(TRAIN.format(spoken=str(spoken)))
    command = ["train.py", "--api-key", IN_SETTINGS["key"], f"--password={IN_SETTINGS['password']}"]
    (project.root / "requirements.in").write_text(
        f"# from https://ci:{IN_SETTINGS['url']}@mirror.site.example/simple\nalpha\ntorch\n"
    )
    project.settings(
        "requirements.in",
        more=f'torch-backend = "none"\n# --index-url https://ci:{IN_SETTINGS["url"]}@mirror/simple\n'
        f'[project]\nname = "{name}"\ncommand = {json.dumps(command)}\n'
        '[launch]\nnproc-per-node = 2\npass-env = ["SITE_CODE"]\n',
    )
    project.build()
    logs = project.root.parent / "logs"
    argv = ["run", "--allocation", "local", "--nodes", "1", "--json", "--log-dir", str(logs)]
    done = project.stager(*argv, "--pass-env", "HF_TOKEN", env=ENVIRONMENT)
    report = json.loads(done.stdout)
    assert done.returncode == 3, done.stderr
    assert report["first_failure"]["cause"].startswith("RuntimeError: login failed")
    job = report["job_id"]
    (rank,) = logs.glob(f"*.{job}.local1.0.out")
    for value in (SPOKEN["json"], ENVIRONMENT["HF_TOKEN"], IN_SETTINGS["key"], PEM):
        assert value in rank.read_text(errors="replace")  # it was really printed
    with (logs / f"events.{job}.jsonl").open("a") as events:
        said = {"v": 1, "event": "note", "text": f'{{"token": "{IN_FILES["event"]}"}}'}
        events.write(json.dumps(said) + "\n")
    with (logs / f"order.{job}.tsv").open("a") as order:
        order.write(f"secret={IN_FILES['order']}\n")
    (logs / f"{name}.{job}.batch.out").write_text(
        f"+ export VAULT_SECRET={IN_FILES['batch']}\nsrun --export=HF_TOKEN={SPOKEN['github']}\n"
    )
    return Planted(project=project, logs=logs, job_id=job, name=name)


def members(archive: Path) -> dict[str, bytes]:
    """The content of each file of an archive."""
    with tarfile.open(archive) as opened:
        return {one.name: (opened.extractfile(one) or io.BytesIO()).read() for one in opened}


def spellings(secret: str) -> Iterator[bytes]:
    """A secret in each way in which somebody could read it."""
    raw = secret.encode()
    yield raw
    yield json.dumps(secret)[1:-1].encode()
    yield json.dumps(json.dumps(secret))[3:-3].encode()
    yield urllib.parse.quote(secret, safe="").encode()
    yield "".join(f"%{byte:02X}" for byte in raw).encode()
    yield raw.hex().encode()
    yield secret.encode("utf-16-le")
    for shift in range(3):
        packed = base64.b64encode(bytes(shift) + raw)
        yield packed[-(-shift * 8 // 6) : (shift + len(raw)) * 8 // 6]


def squeezed(data: bytes) -> bytes:
    return re.sub(rb"[^A-Za-z0-9]", b"", data)


def assert_none(secrets: Mapping[str, str], found: Mapping[str, bytes]) -> None:
    """None of the secrets is in any file or name, in whatever spelling, split in whatever way."""
    for member, data in found.items():
        for where, secret in secrets.items():
            for spelled in spellings(secret):
                assert spelled not in data, f"{where} is in {member}: {spelled!r}"
                assert spelled not in member.encode(), f"{where} is a name: {member}"
            bare = squeezed(secret.encode())
            assert bare not in squeezed(data), f"{where} is in {member}, in pieces"


def test_no_planted_secret_is_in_the_archive(planted: Planted) -> None:
    raw = {p.name: p.read_bytes() for p in planted.logs.iterdir() if planted.job_id in p.name}
    everything = b"".join(raw.values()) + "".join(raw).encode()
    for where, secret in planted.secrets.items():
        if where not in ("WANDB_API_KEY", "DB_PASSWORD", "PIP_EXTRA_INDEX_URL", "url", "escaped"):
            assert secret.encode() in everything, f"{where} was not planted"

    done = planted.stager("support", "--log-dir", str(planted.logs), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"schema", "ok", "archive", "bytes", "files", "redacted"}
    archive = planted.project.root / f"stager-support-{planted.job_id}.tar.gz"
    assert (report["archive"], report["bytes"]) == (str(archive), archive.stat().st_size)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600

    found = members(archive)
    assert len(found) == report["files"]
    assert done.stderr.startswith(f"newest job: {planted.job_id}, run, 20")
    assert_none(planted.secrets, {**found, "the report": (done.stdout + done.stderr).encode()})
    assert sum(report["redacted"].values()) > 60
    assert {"token", "password", "api-key", "private-key", "known-value"} <= set(report["redacted"])
    _assert_useful(planted, {name.partition("/")[2]: data for name, data in found.items()}, raw)

    before = archive.read_bytes()
    again = planted.stager("support", planted.job_id, "--log-dir", str(planted.logs), "-o", "b.tgz")
    assert again.returncode == 0, again.stderr
    assert again.stdout == f"{planted.project.root / 'b.tgz'}\n"
    assert (planted.project.root / "b.tgz").read_bytes() == before


def _assert_useful(planted: Planted, found: dict[str, bytes], raw: dict[str, bytes]) -> None:
    """What somebody needs who looks at it from afar is there, and as it was."""
    job = planted.job_id
    names = {"README.txt", "diagnosis.json", "diagnosis.txt", "versions.json", "manifest.json"}
    names |= {"stager.toml", "pylock.toml", f"events.{job}.jsonl", f"job.{job}.json"}
    names |= {f"order.{job}.tsv", f"preflight.{job}.txt", f"run_wrapper.{job}.py"}
    logs = {f"redacted-github-token.{job}.local1.{rank}.out" for rank in (0, 1)}
    assert set(found) == names | logs | {f"redacted-github-token.{job}.batch.out"}
    for name in (f"run_wrapper.{job}.py", f"preflight.{job}.txt"):
        assert found[name] == raw[name]
    log = found[f"redacted-github-token.{job}.local1.0.out"]
    assert log.count(b"\n") == raw[f"{planted.name}.{job}.local1.0.out"].count(b"\n")
    assert set(log.decode(errors="replace").splitlines()) >= {
        "[RANK 0] tokens/s 1234.5 num_tokens: 5 max_tokens=512",
        "TOKENIZERS_PARALLELISM=false pad_token='<pad>' loss 0.25",
        "+ python tool.py --auth-token [redacted: token] --epochs 3",
        '{"access_token": "[redacted: token]", "expires_in": 3600}',
        "{'api_key': '[redacted: api-key]', 'n': 1}",
    }
    manifest = json.loads(found["manifest.json"])
    assert {layer["name"] for layer in manifest["layers"]} >= {"alpha", "torch"}
    assert b"redacted" not in found["pylock.toml"]
    told = json.loads(found[f"job.{job}.json"])
    assert told["bundle_id"] == manifest["id"]
    assert told["launch"]["command"][1:] == ["--api-key", "***", "--password=***"]
    assert told["launch"]["pass_env"] == ["SITE_CODE", "HF_TOKEN"]
    for line in found[f"events.{job}.jsonl"].splitlines():
        assert isinstance(json.loads(line), dict)
    diagnosis = json.loads(found["diagnosis.json"])
    assert diagnosis["first_failure"]["class"] == "python-error"
    assert b"RuntimeError: login failed, token=[redacted: token]" in found["diagnosis.txt"]
    assert json.loads(found["versions.json"])["torch"] == "2.13.0"
    readme = found["README.txt"].decode()
    assert "LOOK THROUGH IT BEFORE YOU SEND IT" in readme
    assert all(name in readme for name in found if name != "README.txt")


# --- smaller ones, on files that are made here ---------------------------------------------------


def job_of(folder: Path, log: bytes = b"hello\n", **job: Any) -> Path:
    """The files of job 77 on two nodes."""
    folder.mkdir(exist_ok=True)
    nodes = {"nodes": ["hpc07", "hpc08"]}
    (folder / "events.77.jsonl").write_text(json.dumps({"v": 1, "event": "job", **nodes}) + "\n")
    told = {"v": 3, "id": "77", **nodes, "launch": {"pass_env": []}, **job}
    (folder / "job.77.json").write_text(json.dumps(told))
    (folder / "demo.77.hpc07.0.out").write_bytes(log)
    return folder


def made(
    folder: Path,
    target: Path,
    *,
    job: str = "77",
    environment: Mapping[str, str] = {},
    **options: Any,
) -> dict[str, bytes]:
    """The content of an archive, by name below its top folder."""
    files = list_job_files(folder, job) if job else find_job_files(str(folder), folder)
    options_ = SupportOptions(output=target, **options)
    result = make_support_archive(files, options_, lambda found: "words", environment)
    assert not list(target.parent.glob(f".{target.name}*"))
    return {name.partition("/")[2]: data for name, data in members(result.archive).items()}


def test_the_archive_is_plain_and_in_order(tmp_path: Path) -> None:
    target = tmp_path / "a.tar.gz"
    target.write_bytes(b"an older one")
    old = os.umask(0)
    try:
        made(job_of(tmp_path / "logs"), target)
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with tarfile.open(target) as opened:
        listed = opened.getmembers()
    names = [one.name for one in listed]
    assert names == sorted(names)
    assert {name.split("/")[0] for name in names} == {"stager-support-77"}
    for one in listed:
        assert (one.uid, one.gid, one.uname, one.gname, one.mtime) == (0, 0, "", "", 0)
        assert (one.isreg(), one.mode) == (True, 0o644)
    assert target.read_bytes()[4:8] == bytes(4)  # gzip's own time


def test_the_middle_of_a_long_log_is_left_out(tmp_path: Path) -> None:
    lines = [f"line {number} of the log {'x' * 60}\n" for number in range(1, 40_001)]
    found = made(job_of(tmp_path / "logs", "".join(lines).encode()), tmp_path / "a", log_bytes=9000)
    log, whole = found["demo.77.hpc07.0.out"].decode(), "".join(lines)
    before, size, after = re.split(r"\n\[stager support: (\d+) bytes left out here\]\n", log)
    assert (whole.startswith(before), whole.endswith(after)) == (True, True)
    assert len(before) + int(size) + len(after) == len(whole)
    assert "the middle was left out" in found["README.txt"].decode()


@pytest.mark.parametrize("limit", range(300, 2400, 130))
def test_a_secret_that_the_cut_divides_is_taken_out_all_the_same(
    limit: int, tmp_path: Path
) -> None:
    """Wherever it cuts: in a key of several lines, in a long line, before a value on a new line."""
    token = "hf_" + "aB3dE6gH9" * 4
    around = "word " * 40
    log = f"{around}\n{PEM}\n{around}token={token}&x=1 {around}\napi_key:\n  {token}\n{around}" * 3
    found = made(job_of(tmp_path / "logs", log.encode()), tmp_path / "a", log_bytes=limit)
    shown = squeezed(found["demo.77.hpc07.0.out"])
    for secret in (token, *PEM_BODY.splitlines()):
        for at in range(0, len(secret) - 12, 4):
            assert squeezed(secret[at : at + 12].encode()) not in shown


@pytest.mark.full
def test_a_cut_between_a_name_and_its_value(tmp_path: Path) -> None:
    """Nothing else tells that the one word on the line is a secret, or the rest of a long line."""
    lines = b"password:\n  hunter2x\n" * 400
    far = b"word " * 30_000 + b"password=" + b"hunter2x" * 300 + b" and" + b" word" * 30_000
    token = b"hf_qWcXvBnMlKjHgFdSaPoIuYtReW12345678"
    row = b"word " * 30_000 + b" ".join([token] * 60) + b" word" * 30_000
    for log, limits in (
        (lines, range(990, 1010, 2)),
        (far, range(len(far) - 3000, len(far), 293)),
        (row, range(300_100, 302_200, 181)),  # in the middle of tokens, at one end or the other
    ):
        logs = job_of(tmp_path / "logs", log)
        for limit in limits:
            found = made(logs, tmp_path / "a", log_bytes=limit)["demo.77.hpc07.0.out"]
            assert b"left out here" in found
            assert not re.search(rb"hunter|hf_|IuYt|ReW1|5678", found)


def test_links_that_lead_out_and_special_files_are_left_out(tmp_path: Path) -> None:
    logs = job_of(tmp_path / "logs")
    (tmp_path / "outside.txt").write_text("not yours")
    (logs / "demo.77.hpc08.1.out").symlink_to(tmp_path / "outside.txt")
    (logs / "demo.77.hpc08.2.out").symlink_to("demo.77.hpc07.0.out")
    (logs / "demo.77.hpc08.3.out").symlink_to("nowhere")
    (logs / "demo.77.hpc08.5.out").symlink_to("demo.77.hpc08.5.out")
    os.mkfifo(logs / "demo.77.hpc08.4.out")
    os.mkfifo(logs / "preflight.77.txt")
    (logs / "order.77.tsv").symlink_to(tmp_path / "outside.txt")
    found: dict[str, bytes] = {}
    # A pipe that is opened would wait for ever.
    worker = threading.Thread(target=lambda: found.update(made(logs, tmp_path / "a")), daemon=True)
    worker.start()
    worker.join(600)
    assert not worker.is_alive()
    assert "demo.77.hpc07.0.out" in found
    assert found["demo.77.hpc08.2.out"] == b"hello\n"
    assert not {"demo.77.hpc08.1.out", "demo.77.hpc08.3.out", "demo.77.hpc08.4.out"} & set(found)
    assert not {"preflight.77.txt", "order.77.tsv", "demo.77.hpc08.5.out"} & set(found)
    assert all(b"not yours" not in data for data in found.values())
    readme = found["README.txt"].decode()
    assert "demo.77.hpc08.1.out: a link that points outside" in readme
    assert "preflight.77.txt: not a regular file" in readme


def test_names_of_people_and_machines_get_stand_ins(tmp_path: Path) -> None:
    log = (
        b"/home/alice/run on hpc08 (10.1.2.3) for alice, mail alice@site.example.org\n"
        b"nvidia-curand-cu12==10.3.5.147 from hpc[07-08], hpc07.cluster.example.org:29500\n"
    )
    logs = job_of(tmp_path / "logs", b"bobby was here with aB3dE5fG7hI9jK1l\n")
    (logs / "demo.77.hpc08.1.out").write_bytes(log)
    (logs / "demo.77.hpc08.2.out").write_bytes(b"in /home/bobby, the token is aB3dE5fG7hI9jK1l\n")
    assert made(logs, tmp_path / "a")["demo.77.hpc08.1.out"] == log
    found = made(logs, tmp_path / "b", hide_names=True)
    # What is met late is hidden from the beginning.
    assert found["demo.77.node-1.0.out"] == b"USER-2 was here with [redacted: known-value]\n"
    assert found["demo.77.node-2.1.out"] == (
        b"/home/USER/run on node-2 (ip-1) for USER, mail person-1@example.org\n"
        b"nvidia-curand-cu12==10.3.5.147 from node-[...], node-1:29500\n"
    )
    assert json.loads(found["job.77.json"])["nodes"] == ["node-1", "node-2"]
    for name, data in found.items():
        assert b"hpc0" not in data, name
        assert b"alice" not in data, name


def test_somebody_elses_logs(tmp_path: Path) -> None:
    logs = tmp_path / "foreign=logs"
    (logs / "deep").mkdir(parents=True)
    for name, text in (
        ("README.txt", "a log with such a name\n"),
        ("deep/rank_1.log", "token=abc123def\n"),
        ("token=Zz11Yy22Xx33.log", "hello\n"),
        ("token=Ww44Vv55Uu66.log", "world\n"),
    ):
        (logs / name).write_text(text)
    found = made(logs, tmp_path / "a", job="")
    twins = {"token=redacted-token": b"world\n", "token=redacted-token-2": b"hello\n"}
    assert {name: data for name, data in found.items() if name.startswith("logs/")} == {
        "logs/README.txt": b"a log with such a name\n",
        "logs/deep/rank_1.log": b"token=[redacted: token]\n",
        **{f"logs/{name}": data for name, data in twins.items()},
    }


def test_values_of_the_environment_are_found_bare(tmp_path: Path) -> None:
    log = b"it says lettersAndWords, and hunter2 too; a path is /opt/keys/one\n"
    logs = job_of(tmp_path / "logs", log, launch={"pass_env": ["PASSED"]})
    environment = {
        "PASSED": "lettersAndWords",
        "SMTP_PASS": "hunter2",
        "API_KEY_FILE": "/opt/keys/one",
        "TOKENIZERS_PARALLELISM": "false",
        "MY_AUTH": "true",
    }
    found = made(logs, tmp_path / "a", environment=environment)
    assert found["demo.77.hpc07.0.out"] == (
        b"it says [redacted: known-value], and [redacted: known-value] too;"
        b" a path is /opt/keys/one\n"
    )


def test_the_list_shows_what_would_go_in_and_writes_nothing(tmp_path: Path) -> None:
    logs, place = job_of(tmp_path / "logs", b"x" * 5000), tmp_path / "here"
    place.mkdir()
    write_stacks(logs, job_stacks())
    project = Project(root=place, store=Store(tmp_path / "store"))
    asked = ("support", "--log-dir", str(logs), "--list", "--max-log-bytes", "1000")
    done = project.expect(*asked)
    assert "5,000  demo.77.hpc07.0.out (cut to 1,000)" in done.stdout
    assert "README.txt" in done.stdout
    assert "run_wrapper.77.py: not there" in done.stderr
    files = json.loads(project.stager(*asked, "--json").stdout)["files"]
    log = "demo.77.hpc07.0.out"
    assert {"name": log, "bytes": 5000, "cut": True} in files
    assert "stacks.77.json" in [file["name"] for file in files]
    assert list(place.iterdir()) == []


def test_what_cannot_be_written_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    job_of(tmp_path / "logs", b"line\n" * 100_000)
    place = tmp_path / "here"
    place.mkdir()
    # What is written cannot be closed either.
    argv = ["sh", "-c", 'ulimit -f 20; exec "$@"', "sh", *STAGER, "support", "--log-dir", "../logs"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # it would be cut short, too
    done = subprocess.run(
        argv, cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(place.iterdir()) == []


def test_a_large_log_is_not_read_into_memory(tmp_path: Path) -> None:
    logs = job_of(tmp_path / "logs")
    with (logs / "demo.77.hpc07.0.out").open("wb") as log:
        log.write(b"the first line\n")
        log.truncate(1 << 30)  # a hole, which takes no room on the disk
        log.seek(0, os.SEEK_END)
        log.write(b"\ntoken=abc123def at the end\n")
    # Not resource.getrusage: its maximum counts what this process had when it forked.
    code = (
        "import re, sys; from stager.cli import main; code = main(sys.argv[1:]);"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1];"
        "print(peak, file=sys.stderr); sys.exit(code)"
    )
    argv = [STAGER[0], "-c", code, "support", "--log-dir", str(logs), "-o", str(tmp_path / "a")]
    argv += ["--max-log-bytes", "100000", "-q"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    log = members(tmp_path / "a")["stager-support-77/demo.77.hpc07.0.out"]
    assert log.endswith(b"token=[redacted: token] at the end\n")
    assert int(done.stderr.split()[-1]) < 300_000  # KiB
