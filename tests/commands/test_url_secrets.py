"""Credentials in a requirement's URL: they are used, and neither kept nor shown."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.building import Project
from tests.support.index_server import Index, serve
from tests.support.locks import BOTH

HUSH = "hush"
QUERY = "?token=tokenhush&X-Amz-Signature=signhush"


@pytest.fixture
def index(wheelhouse: Path) -> Iterator[Index]:
    with serve(Index(folder=wheelhouse)) as running:
        yield running


def wheel_name(wheelhouse: Path) -> str:
    (found,) = wheelhouse.glob("alpha-*.whl")
    return found.name


def settle(project: Project, *lines: str) -> None:
    (project.root / "requirements.in").write_text("".join(f"{line}\n" for line in lines))
    project.settings("requirements.in")


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@BOTH
def test_the_lock_and_the_bundle_hold_none(
    project: Project, wheelhouse: Path, index: Index, resolver: str
) -> None:
    place = index.url.removesuffix("/simple").replace("://", "://u:passhush@")
    settle(project, f"alpha @ {place}/files/{wheel_name(wheelhouse)}{QUERY}")
    done = project.stager("build", "-v", "--resolver", resolver)
    assert done.returncode == 0, said(done)
    assert f"GET /files/{wheel_name(wheelhouse)}{QUERY}" in index.asked  # it was used
    assert HUSH not in said(done)
    assert HUSH not in (project.root / "pylock.toml").read_text()
    kept = [path for path in project.store.root.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"hush" in path.read_bytes()]
    bill = project.stager("inspect", "--sbom")
    assert HUSH not in said(bill)
    (alpha,) = (one for one in json.loads(bill.stdout)["components"] if one["name"] == "alpha")
    (reference,) = alpha["externalReferences"]
    place = index.url.removesuffix("/simple")
    assert reference["url"] == f"{place}/files/{wheel_name(wheelhouse)}"
    assert reference["hashes"] == alpha["hashes"]


@BOTH
@pytest.mark.parametrize("name", ["alpha-9.0-py3-none-any.whl", "alpha-9.0.tar.gz"])
def test_a_download_that_fails_shows_none(
    project: Project, index: Index, resolver: str, name: str
) -> None:
    place = index.url.removesuffix("/simple").replace("://", "://u:passhush@")
    settle(project, f"alpha @ {place}/files/{name}{QUERY}")
    for options in ((), ("-v",), ("--json",)):
        done = project.stager("lock", "--resolver", resolver, *options)
        assert done.returncode == 1, said(done)
        assert name in said(done)
        assert HUSH not in said(done)


def test_a_locked_file_that_is_gone_shows_none(
    project: Project, wheelhouse: Path, index: Index
) -> None:
    place = index.url.removesuffix("/simple")
    name = wheel_name(wheelhouse)
    settle(project, f"alpha @ {place}/files/{name}{QUERY}")
    project.expect("lock")
    (wheelhouse / name).unlink()
    done = project.expect("build", "--json", code=1)
    assert not json.loads(done.stdout)["ok"]
    assert HUSH not in said(done)


@pytest.mark.parametrize(
    "line",
    [
        f"alpha @ http://u:passhush@h/page{QUERY}",
        f"alpha @ http://u:passhush@h/x.whl{QUERY}",
        f"alpha @ http://u:passhush@h/x.whl{QUERY} ; no_such_marker == 1",
        f"--index-url http://u:passhush@h/simple{QUERY} --nonsense",
        f"http://u:passhush@h/x y{QUERY}",
    ],
)
def test_a_line_that_cannot_be_read_shows_none(project: Project, line: str) -> None:
    settle(project, line)
    done = project.stager("lock", "-v")
    assert done.returncode == 1, said(done)
    assert HUSH not in said(done)
