"""Signing on the command line, and what is refused where a signature is required."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stager.core.store import Store
from stager.pack.members import copy_to
from tests.support.building import STAGER, Project
from tests.support.processes import until
from tests.support.signing import ALICE, Key, allow, make_key

LOCAL = ("--allocation", "local", "--log-dir", "logs")
SETTINGS = """\
[project]
command = ["train.py"]
[launch]
launcher = "processes"
[trust]
allowed-signers = "../trusted/allowed_signers"
require = true
"""


@pytest.fixture
def asking(project: Project, tmp_path: Path, alice: Key) -> Project:
    """A project that requires alice's signature; its program leaves a file when it runs."""
    (tmp_path / "trusted").mkdir()
    allow(tmp_path / "trusted", f"{ALICE} {alice.public}")
    (project.root / "train.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return project.settings("alpha", more=SETTINGS)


def ended(project: Project, *arguments: str, status: int = 0) -> str:
    """Run a command, which ends with a status; what it said on standard error."""
    done = project.stager(*arguments)
    assert done.returncode == status, done.stderr
    return done.stderr


def test_only_what_is_signed_runs(asking: Project, alice: Key, tmp_path: Path) -> None:
    asking.build()
    programs = {*asking.store.programs.iterdir()}
    ran = tmp_path / "ran"
    for command in (
        ("run", *LOCAL),
        ("verify", *LOCAL),
        ("exec", "--", "python", "train.py"),
        ("script",),
    ):
        assert "is not signed, and trust.require asks" in ended(asking, *command, status=1)
    assert not ran.exists()
    assert not (asking.root / "logs").exists()
    assert {*asking.store.programs.iterdir()} == programs
    signed = asking.report("sign", "--key", str(alice.private))
    assert signed["signature"] == f"{signed['bundle']}.sig"
    assert "signed by alice@example.org (ED25519 key SHA256:" in ended(asking, "verify", *LOCAL)
    assert not ran.exists()
    ended(asking, "run", *LOCAL)
    assert ran.exists()
    (asking.root / "train.py").write_text("print('another program')\n")
    assert "is not signed" in ended(asking, "run", *LOCAL, status=1), "it was built again"
    (asking.root / "train.py").write_text("print('a third one')\n")
    assert "building it again" in ended(asking, "sign", "--key", str(alice.private))
    ended(asking, "run", *LOCAL)


def test_build_signs_and_a_copy_has_the_signature_beside_it(
    asking: Project, alice: Key, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.pkgs.tar"
    build = ("build", "--no-prove", "--sign", str(alice.private), "--output", str(copy))
    built = asking.report(*build)
    assert built["signature"] == f"{built['bundle']}.sig"
    assert Path(built["signature"]).read_text() == Path(f"{copy}.sig").read_text()
    ended(asking, "verify", *LOCAL, "--bundle", str(copy))
    found = asking.report("inspect", str(copy))["signature"]
    assert (found["accepted"], found["signer"], found["why"]) == (True, ALICE, "")
    assert "signed by alice@example.org" in asking.stager("inspect").stdout


def test_an_altered_copy_leaves_no_trace(asking: Project, alice: Key, tmp_path: Path) -> None:
    asking.build(sign=None)
    ended(asking, "sign", "--key", str(alice.private))
    [bundle] = asking.store.bundles.glob("*.pkgs.tar")
    copy = tmp_path / "copy.tar"
    shutil.copy(f"{bundle}.sig", f"{copy}.sig")
    data = copy_to(bundle, tmp_path / "whole.pkgs.tar").read_bytes()
    for place in (700, len(data) // 2, len(data) - 3000):
        altered = bytearray(data)
        altered[place] ^= 1
        copy.write_bytes(altered)
        elsewhere = {"OFFLINE_ROOT": str(tmp_path / "elsewhere")}
        asking.expect("run", *LOCAL, "--bundle", str(copy), code=1, env=elsewhere)
        assert [*Store(tmp_path / "elsewhere").programs.iterdir()] == []
    assert not (tmp_path / "ran").exists()
    assert not (asking.root / "logs").exists()


@pytest.mark.full
def test_a_signature_crosses_the_gap(
    asking: Project, alice: Key, mallory: Key, tmp_path: Path
) -> None:
    asking.build()
    inside = {"OFFLINE_ROOT": str(tmp_path / "inside")}
    carried = tmp_path / "lab.carry.tar"
    assert not asking.report("export", "-o", str(carried))["signed"]
    done = asking.stager("import", str(carried), env=inside)
    assert (done.returncode, "is not signed" in done.stderr) == (1, True), done.stderr
    ended(asking, "sign", "--key", str(mallory.private))
    ended(asking, "export", "-o", str(carried))
    done = asking.stager("import", str(carried), env=inside)
    assert (done.returncode, "that key may not sign" in done.stderr) == (1, True), done.stderr
    assert [*(tmp_path / "inside").rglob("*.pkgs.tar*")] == []
    ended(asking, "sign", "--key", str(alice.private))
    assert asking.report("export", "-o", str(carried))["signed"]
    done = asking.expect("import", str(carried), "--json", env=inside)
    taken = json.loads(done.stdout)
    assert taken["signature"]["signer"] == ALICE
    done = asking.expect("verify", *LOCAL, "--id", taken["id"][:12], env=inside)


@pytest.fixture
def agent(tmp_path: Path, alice: Key, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A running ssh-agent that holds alice's key; the public key alone, in a folder of its own."""
    socket = tmp_path / "agent"
    running = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        # The socket's file is there before the agent listens; ssh-add ends with 2 until it does.
        adding = ["ssh-add", "-q", str(alice.private)]
        assert until(
            lambda: subprocess.run(adding, check=False, stderr=subprocess.DEVNULL).returncode == 0
        )
        public = tmp_path / "only.pub"
        public.write_text(alice.public + "\n")
        yield public
    finally:
        running.terminate()
        running.wait()


def test_a_passphrase_needs_a_terminal_or_an_agent(
    asking: Project, agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the message advises is done here: the agent gets the key, and signs."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("SSH_ASKPASS", raising=False)
    key = make_key(tmp_path, "with-passphrase", passphrase="opensesame")
    asking.build()
    argv = [*STAGER, "sign", "--key", str(key.private)]
    refused = subprocess.run(
        argv, cwd=asking.root, capture_output=True, text=True, check=False, start_new_session=True
    )
    assert refused.returncode == 1
    assert "incorrect passphrase" in refused.stderr
    assert "the public key (.pub) of one that your ssh-agent holds: `ssh-add KEY`" in refused.stderr

    answer = tmp_path / "answer"
    answer.write_text("#!/bin/sh\necho opensesame\n")
    answer.chmod(0o700)
    asked = {"DISPLAY": "none", "SSH_ASKPASS": str(answer), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(
        ["ssh-add", "-q", str(key.private)],
        env={**os.environ, **asked},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
    ended(asking, "sign", "--key", f"{key.private}.pub")


def test_a_key_that_cannot_sign(asking: Project, tmp_path: Path) -> None:
    asking.build()
    said = ended(asking, "sign", "--key", str(tmp_path / "none"), status=1)
    assert "error: ssh-keygen could not sign with" in said
    assert said.count("No such file") == 1
    assert "hint: name a private key" in said
    assert [*asking.store.bundles.glob("*.sig")] == []


def test_without_require_a_signature_is_only_shown(asking: Project, mallory: Key) -> None:
    asking.settings("alpha", more=SETTINGS.replace("require = true", "require = false"))
    asking.build()
    assert "project-" in (said := ended(asking, "verify", *LOCAL))
    assert ": not signed" in said
    ended(asking, "sign", "--key", str(mallory.private))
    assert "that key may not sign" in ended(asking, "verify", *LOCAL)


def test_a_file_of_signers_that_is_missing_is_said_before_anything_is_built(
    asking: Project, tmp_path: Path
) -> None:
    asking.build()
    (asking.root / "train.py").write_text("print('changed')\n")
    (tmp_path / "trusted" / "allowed_signers").unlink()
    said = ended(asking, "run", *LOCAL, status=1)
    assert "trust.allowed-signers" in said
    assert "building it again" not in said


def test_clean_removes_the_signature_of_a_bundle_that_is_gone(asking: Project, alice: Key) -> None:
    asking.build()
    ended(asking, "sign", "--key", str(alice.private))
    [bundle] = asking.store.bundles.glob("*.pkgs.tar")
    os.unlink(bundle)
    ended(asking, "clean", "--store-only")
    assert [*asking.store.bundles.iterdir()] == []
