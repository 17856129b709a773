"""Results that come where earlier ones are: they join them, and no file is lost."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from bundle.results.receive import Received, receive_outputs
from bundle.results.selection import OutputEntry, select_outputs
from bundle.results.stream import send_outputs


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The run directory, with the results of an earlier job."""
    out = tmp_path / "home" / "out"
    (out / "checkpoint-1").mkdir(parents=True)
    for name, text in (("checkpoint-1/model", "one"), ("log", "1\n"), ("config", "c")):
        (out / name).write_text(text)
    (out / "best").symlink_to("checkpoint-1")
    return tmp_path / "home"


@pytest.fixture
def work(home: Path, tmp_path: Path) -> Path:
    """The same on a node, where a job has gone on and deleted its older checkpoint."""
    out = tmp_path / "work" / "out"
    shutil.copytree(home, out.parent, symlinks=True)
    (out / "checkpoint-1").rename(out / "checkpoint-2")
    (out / "checkpoint-2" / "model").write_text("two")
    (out / "log").write_text("1\n2\n")
    (out / "best").unlink()
    (out / "best").symlink_to("checkpoint-2")
    return out.parent


def sent_from(home: Path) -> dict[str, OutputEntry]:
    return {entry.name: entry for entry in select_outputs(str(home), ["out"]).entries}


def bring(
    work: Path,
    home: Path,
    sent: dict[str, OutputEntry],
    deleted: Sequence[str] = ("out/checkpoint-1",),
    first: Received | None = None,
) -> Received:
    stream = io.BytesIO()
    send_outputs(str(work), ["out"], stream, deleted, brought=first and tuple(first.names))
    stream.seek(0)
    joined = first.renamed if first else None
    return receive_outputs(stream, str(home), ["out"], sent=sent, joined=joined)


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_a_job_leaves_at_home_what_it_has_left_on_the_node(work: Path, home: Path) -> None:
    got = bring(work, home, sent_from(home))
    assert (got.complete, got.renamed, got.removed) == (True, {}, 1)
    assert content(home) == content(work)
    assert sorted(os.listdir(home)) == ["out"]
    assert not (home / "out" / "checkpoint-1").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda out: (out / "log").write_text("of another job\n"),
        lambda out: ((out / "log").unlink(), (out / "log").mkdir()),
        lambda out: ((out / "best").unlink(), (out / "best").symlink_to("config")),
        lambda out: (out / "checkpoint-2").write_text("a file"),
    ],
    ids=["file", "folder for a file", "link", "file for a folder"],
)
def test_what_has_changed_at_home_meanwhile_is_not_lost(
    work: Path, home: Path, change: object
) -> None:
    sent = sent_from(home)
    change(home / "out")
    before = content(home / "out")
    got = bring(work, home, sent)
    assert (got.renamed, got.removed) == ({"out": "out.1"}, 0)
    assert content(home / "out") == before
    assert content(home / "out.1") == content(work / "out")


def test_two_jobs_of_one_project_lose_nothing(work: Path, home: Path, tmp_path: Path) -> None:
    """The second one finds what the first has changed, unless both have written other files."""
    sent = sent_from(home)
    other = tmp_path / "other"
    shutil.copytree(work, other, symlinks=True)
    assert bring(work, home, sent).renamed == {}
    (other / "out" / "log").write_text("1\nanother\n")
    assert bring(other, home, sent).renamed == {"out": "out.1"}
    assert (home / "out" / "log").read_text() == "1\n2\n"
    own = tmp_path / "own"
    (own / "out").mkdir(parents=True)
    (own / "out" / "third").write_text("3")
    assert bring(own, home, sent).renamed == {}
    assert (home / "out" / "third").read_text() == "3"


@pytest.mark.parametrize("sent", [True, False])
def test_what_other_nodes_have_besides_joins_what_the_first_has_sent(
    work: Path, home: Path, tmp_path: Path, sent: bool
) -> None:
    """Under its new name, too; a file that both have is the first one's."""
    before, entries = content(home / "out"), sent_from(home) if sent else {}
    other = tmp_path / "other"
    (other / "out" / "checkpoint-2" / "empty").mkdir(parents=True)
    for name in ("log", "checkpoint-2/model", "checkpoint-2/shard"):
        (other / "out" / name).write_text("other")
    first = bring(work, home, entries)
    name = "out" if sent else "out.1"
    assert first.renamed == ({} if sent else {"out": name})
    more = bring(other, home, entries, (), first)
    assert (more.names, more.placed) == ({"out/checkpoint-2/shard"}, (name,))
    shard = {"checkpoint-2/shard": "other"}
    assert content(home / name) == {**content(work / "out"), **shard}
    assert sent or content(home / "out") == before
    assert sorted(os.listdir(home)) == (["out"] if sent else ["out", "out.1"])


def test_a_file_that_has_changed_is_not_removed_although_the_job_has_deleted_it(
    work: Path, home: Path
) -> None:
    sent = sent_from(home)
    (home / "out" / "checkpoint-1" / "model").write_text("mine")
    (home / "out" / "checkpoint-1" / "notes").write_text("mine, too")
    assert bring(work, home, sent).removed == 0
    assert sorted(os.listdir(home / "out" / "checkpoint-1")) == ["model", "notes"]


def test_an_output_that_is_gone_as_a_whole_stays_at_home(home: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    before = content(home)
    got = bring(tmp_path / "work", home, sent_from(home), ["out"])
    assert (got.missing, got.removed, content(home)) == (("out",), 0, before)


def test_links_at_home_are_followed_only_inside(work: Path, home: Path, tmp_path: Path) -> None:
    (home / "data").mkdir()
    (home / "out").rename(home / "data" / "out")
    (home / "out").symlink_to("data/out")
    assert bring(work, home, sent_from(home)).renamed == {}
    assert (home / "data" / "out" / "checkpoint-2" / "model").read_text() == "two"
    (home / "out").unlink()
    (home / "data" / "out").rename(tmp_path / "scratch")
    (home / "out").symlink_to(tmp_path / "scratch")
    before = content(tmp_path / "scratch")
    assert sent_from(home) == {}
    assert bring(work, home, {}).renamed == {"out": "out.1"}
    assert content(tmp_path / "scratch") == before
