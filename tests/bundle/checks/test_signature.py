"""A node checks who has signed the bundle before it does anything for the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.agent import agent
from bundle.checks import signature
from bundle.checks.signature import NAMESPACE, check_signature, parse_keygen_lines, statement
from bundle.driver.transports.agent_program import AgentProgram, factor_requests
from bundle.protocol.enumerations import Action, Allocation, PhaseName
from bundle.protocol.job import Job, Trust, redact_job
from bundle.protocol.messages import AgentRequest, EarlyRequest, PreflightRequest, ProbeRequest
from bundle.protocol.problem import NodeError, ProblemCode
from bundle.system.processes import CompletedCommand
from stager.core.store import Store
from stager.core.values import Wheel
from stager.pack.bundle import Packed
from stager.pack.node_program import make_node_program
from tests.support.bundles import BASE_PYTHON, OWN, make_bundle, run_node, stage
from tests.support.jobs import PLAIN, ask, job_for
from tests.support.signing import ALICE, Key, certified, make_key
from tests.support.wheelhouse import make_wheel

OTHER = "0" * 64


def why(trust: Trust) -> str:
    with pytest.raises(NodeError) as caught:
        check_signature(replace(PLAIN, trust=trust))
    problem = caught.value.problem
    assert problem.code is ProblemCode.SIGNATURE_REFUSED
    assert problem.where == PLAIN.bundle_id[:12]
    return problem.why


def test_a_good_signature_is_accepted(alice: Key) -> None:
    assert check_signature(replace(PLAIN, trust=alice.trusted(PLAIN.bundle_id))) == ""
    assert check_signature(PLAIN) == "", "none is required"
    job = replace(PLAIN, trust=alice.trusted(PLAIN.bundle_id))
    assert redact_job(job).trust is None, "what is kept of a job names nobody"
    assert Job.from_json(job.to_json()) == job


def test_a_signature_that_is_not_good(alice: Key, mallory: Key) -> None:
    assert "incorrect signature" in why(alice.trusted(OTHER))
    signers = alice.trusted(OTHER).signers
    assert why(replace(mallory.trusted(PLAIN.bundle_id), signers=signers)), "nobody allows that key"
    assert "namespace" in why(alice.trusted(PLAIN.bundle_id, 'namespaces="git"'))
    made = alice.sign(statement(PLAIN.bundle_id), namespace="git")
    assert "namespace" in why(replace(alice.trusted(PLAIN.bundle_id), signature=made))
    reason = why(alice.trusted(PLAIN.bundle_id, 'valid-before="20200101"'))
    assert reason.startswith("line 1: key has expired"), reason
    here = f"/proc/{os.getpid()}/fd/5"  # a file in memory, which has no path
    said = f"{here}:3: key has expired\n{here}: invalid option: bad\nCould not verify signature.\n"
    assert parse_keygen_lines(CompletedCommand(("ssh-keygen",), 255, "", said)) == (
        "line 3: key has expired",
        "a file in memory: invalid option: bad",
        "Could not verify signature.",
    )


def test_a_certificate_that_has_expired(alice: Key, tmp_path: Path) -> None:
    """The authority's line holds; the node asks for the certificate's own time as well."""
    own = make_key(tmp_path, "own")
    trust = alice.trusted(PLAIN.bundle_id, "cert-authority")
    for validity, reason in (("+1d", ""), ("20200101:20210101", "Certificate invalid: expired")):
        made = certified(alice, own, "-n", ALICE, "-V", validity).sign(statement(PLAIN.bundle_id))
        signed = replace(trust, signature=made)
        if reason:
            assert reason in why(signed)
        else:
            assert check_signature(replace(PLAIN, trust=signed)) == ""


def test_a_node_that_cannot_check_says_so(
    alice: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has still compared the bundle with its id, which was signed."""
    job = replace(PLAIN, trust=alice.trusted(PLAIN.bundle_id))
    signature._check_cached.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_signature(job).startswith("ssh-keygen cannot be started")
    old = tmp_path / "ssh-keygen"
    old.write_text("#!/bin/sh\necho unknown option -- Y >&2\nexit 1\n")
    old.chmod(0o755)
    signature._check_cached.cache_clear()
    assert "older than OpenSSH 8.1" in check_signature(job)
    signature._check_cached.cache_clear()


def test_the_documented_command_says_the_same(alice: Key, single: Packed, tmp_path: Path) -> None:
    """Without any code of ours: tar, sed, sha256sum and ssh-keygen."""
    trust = alice.trusted(single.manifest.id)
    (tmp_path / "allowed_signers").write_text(trust.signers)
    (tmp_path / "bundle.sig").write_text(trust.signature)
    script = f"""set -eu
id=$(tar -xOf {single.path} manifest.json | sed 's/"id":"[0-9a-f]*",//' | sha256sum | cut -c1-64)
echo "stager bundle $id" | ssh-keygen -Y verify -n {NAMESPACE} \\
    -f allowed_signers -I {ALICE} -s bundle.sig
"""
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"for {ALICE}" in done.stdout


# --- a job ---------------------------------------------------------------------------------------


def drive(program: Path, job: Job) -> tuple[int, list[dict[str, Any]]]:
    file = Path(job.run_dir) / "job.json"
    file.write_text(json.dumps(job.to_json()))
    done = run_node(program, "drive", file, env=os.environ)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_nodes_that_cannot_check_are_named(
    single: Packed, program: Path, tmp_path: Path, alice: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for(single, tmp_path, trust=alice.trusted(single.manifest.id))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    code, events = drive(program, job)
    assert code == 0, events
    notes = [event["text"] for event in events if event["event"] == "note"]
    (note,) = (text for text in notes if "signature was not checked" in text)
    assert note.startswith("local1, local2: the bundle's signature was not checked there")


def test_a_job_whose_key_has_expired_ends_before_anything_of_it_runs(
    single: Packed, program: Path, tmp_path: Path, alice: Key
) -> None:
    """As one that has waited in the queue for too long."""
    trust = alice.trusted(single.manifest.id, 'valid-before="20200101"')
    code, events = drive(program, job_for(single, tmp_path, trust=trust))
    assert code == 3
    problems = events[-1]["problems"]
    assert {node: [one["code"] for one in found] for node, found in problems.items()} == {
        "local1": ["signature-refused"],
        "local2": ["signature-refused"],
    }
    assert [event["phase"] for event in events if event["event"] == "begin"] == ["preflight"]
    assert [*Path(os.environ["STAGER_NODE_ROOT"]).rglob("envs/*")] == []


# --- agents --------------------------------------------------------------------------------------


def test_an_agent_refuses_before_it_does_anything(
    single: Packed, program: Path, tmp_path: Path, alice: Key, mallory: Key
) -> None:
    key = single.manifest.id
    good = alice.trusted(key)
    base = tmp_path / "base"
    base.mkdir(mode=0o700)
    job = job_for(single, tmp_path, node_root=str(base), trust=good)
    bad = replace(good, signature=mallory.trusted(key).signature)
    found = {"root": str(base / f"stager-{os.geteuid()}"), "python": "/usr/bin/false"}
    requests = {
        "preflight": {},
        "unpack": {**found, "bundle": str(single.path)},
        "probe": {**found, "head": "127.0.0.1"},
    }
    for phase, request in requests.items():
        code, (event,) = ask(program, phase, replace(job, trust=bad), **request)
        assert (code, event["ok"]) == (3, False)
        assert [problem["code"] for problem in event["problems"]] == ["signature-refused"]
    assert list(base.iterdir()) == []
    code, (event,) = ask(program, "preflight", job)
    assert (code, event["ok"]) == (0, True)
    assert event["unchecked"] == ""


@pytest.mark.parametrize("good", [True, False])
def test_a_step_of_slurms_brings_what_its_agents_check_with(
    single: Packed, tmp_path: Path, alice: Key, good: bool
) -> None:
    """What `srun` starts on a node, as it starts it: the bootstrap program and its input."""
    signed_id = single.manifest.id if good else OTHER
    job = job_for(single, tmp_path, allocation=Allocation.SLURM, trust=alice.trusted(signed_id))
    program = AgentProgram(make_node_program())
    requests = {"local1": PreflightRequest(job, "local1", 0, 1)}
    sent = program.make_step_input(factor_requests(requests))
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program.bootstrap, "agent", PhaseName.SESSION],
        env={**os.environ, "STAGER_NODE": "local1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as step:
        assert step.stdin is not None
        assert step.stdout is not None
        step.stdin.write(sent)
        step.stdin.flush()
        said = step.stdout.readline()  # a driver that goes away ends its agents
        step.stdin.close()
    assert b'"event": "preflight"' in said, said
    assert (b"signature-refused" in said) == (not good)
    assert (b'"root": "/' in said) == good, said


def test_no_launcher_starts_before_the_environment_was_compared(
    store: Store, zstd_wheel: Wheel | None, tmp_path: Path, alice: Key
) -> None:
    """One that only imports torch starts early elsewhere, beside the comparison."""

    def starts_early(request: AgentRequest) -> bool:
        launcher = agent._start_early(request)
        if launcher is not None:
            launcher.close()
        return launcher is not None

    modules = {"torch/__init__.py": "", "torch/distributed/__init__.py": ""}
    wheel = make_wheel(tmp_path, "torch", files=modules)
    packed = make_bundle(store, [wheel], decompressor=zstd_wheel, name="early")
    base = Path(os.environ["STAGER_NODE_ROOT"])
    stage(packed, base)
    job = job_for(packed, tmp_path, action=Action.RUN)
    signed = replace(job, trust=alice.trusted(packed.manifest.id))
    root = str(base / OWN)
    assert starts_early(EarlyRequest(job, "local1", 0, 1))
    assert not starts_early(EarlyRequest(signed, "local1", 0, 1))
    assert not starts_early(PreflightRequest(signed, "local1", 0, 1))
    assert starts_early(ProbeRequest(signed, "local1", 0, 1, root, BASE_PYTHON, head="127.0.0.1"))
    unsigned = replace(signed, trust=alice.trusted(OTHER))
    probe = ProbeRequest(unsigned, "local1", 0, 1, root, BASE_PYTHON, head="127.0.0.1")
    assert not starts_early(probe)
