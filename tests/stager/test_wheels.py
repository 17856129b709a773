import hashlib
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from stager import wheels
from stager.core import store as digest_cache
from stager.core.errors import ResolveError, WheelError
from stager.core.processes import run
from stager.core.store import DigestCache, Store, digest_file
from stager.core.values import Digest, LockedFile, Target, Wheel
from stager.lock.build_source import BuildSettings
from stager.lock.indexes import Indexes
from stager.lock.pip import NoNodeError, ResolvedFile
from stager.lock.pylock import Lock
from tests.support.building import fetch
from tests.support.index_server import Index, serve
from tests.support.sources import own_sdist
from tests.support.wheelhouse import make_wheel

HERE = Target.from_host()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index with two wheels; pip is configured for it and nothing else."""
    folder = tmp_path / "served"
    make_wheel(folder, "alpha")
    make_wheel(folder, "beta", "2.0+local.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    with serve(Index(folder=folder)) as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


def locked(file, index=None, **changes):
    """A lock's entry for a file on disk, or served."""
    name, version = ResolvedFile(filename=file.name).identity
    url = f"http://127.0.0.1:{index.port}/files/{file.name}" if index else None
    entry = LockedFile(
        name=name,
        version=version,
        filename=file.name,
        sha256=digest_file(file),
        size=file.stat().st_size,
        url=url,
        path=None if index else file,
    )
    return replace(entry, **changes)


def lock_of(*files, target=HERE, path=None, **more):
    lock = Lock(
        path=path or Path("pylock.toml"),
        target=target,
        files=tuple(sorted(files, key=lambda file: file.name)),
        spec_digest=None,
        indexes=Indexes(),
        sources=(),
    )
    return replace(lock, **more)


def served(index):
    return lock_of(*(locked(file, index) for file in sorted(index.folder.iterdir())))


def counting():
    """A runner that starts the real programs and notes which command of pip it was."""
    calls: list[str] = []

    def runner(argv, **options):
        calls.append(argv[3])
        return run(argv, **options)

    return calls, runner


def fails(*args, **options):
    with pytest.raises(WheelError) as caught:
        fetch(*args, **options)
    assert "Traceback" not in "".join(caught.value.context)
    return caught.value


# --- fetching ------------------------------------------------------------------------------------


def test_files_are_downloaded_checked_and_kept(index, store):
    """Whatever the target is; and only once."""
    lines: list[str] = []
    calls, runner = counting()
    target = Target(python="3.99", platform="manylinux_2_28_aarch64")
    make_wheel(index.folder, "fast", tag="cp399-cp399-manylinux_2_17_aarch64")
    files = sorted(index.folder.iterdir())
    lock = lock_of(*(locked(file, index) for file in files), target=target)
    wheels = fetch(lock, store, run=runner, progress=lines.append)
    assert calls == ["download"]  # one for all
    for wheel, entry, file in zip(wheels, lock.files, files, strict=True):
        kept = store.wheels / file.name
        assert wheel == Wheel(name=entry.name, version=entry.version, path=kept,
                              sha256=entry.sha256, size=entry.size)  # fmt: skip
        assert wheel.path.read_bytes() == file.read_bytes()
    (line,) = lines
    said = r"downloading 3 of 3 \(.* k?B\): alpha 1.0, beta 2.0\+local.1, fast 1.0"
    assert re.fullmatch(said, line), line
    assert sorted(path.name for path in store.wheels.iterdir()) == [w.path.name for w in wheels]
    assert not list((store.root / "tmp").iterdir())
    assert fetch(lock, store, offline=True, run=runner) == wheels
    assert calls == ["download"]


def test_what_was_read_once_is_not_read_again(store, monkeypatch):
    """So that an environment of large wheels takes no time."""
    files = [make_wheel(store.wheels, f"package-{number}") for number in range(50)]
    lock = lock_of(*(locked(file, path=None) for file in files))
    hashed: list[Path] = []

    def counted(path):
        hashed.append(path)
        return digest_file(path)

    for module in (digest_cache, wheels):
        monkeypatch.setattr(module, "digest_file", counted)
    assert len(fetch(lock, store, offline=True)) == 50
    assert sorted(hashed) == sorted(files)
    hashed.clear()
    calls, runner = counting()
    assert len(fetch(lock, store, offline=True, run=runner)) == 50
    assert (hashed, calls) == ([], [])


def test_a_file_from_a_folder_is_copied(tmp_path, store):
    file = make_wheel(tmp_path / "mine", "alpha")
    calls, runner = counting()
    (wheel,) = fetch(lock_of(locked(file)), store, offline=True, run=runner)
    assert calls == []
    assert wheel.path == store.wheels / file.name
    assert wheel.path.stat().st_ino != file.stat().st_ino  # editing one must not change the other


def test_a_file_from_a_folder_that_is_gone_is_looked_up_by_name(index, store, tmp_path):
    file = index.folder / "alpha-1.0-py3-none-any.whl"
    lock = lock_of(locked(file, path=tmp_path / "gone" / file.name))
    (wheel,) = fetch(lock, store)
    assert wheel.sha256 == digest_file(file)


# --- passwords -----------------------------------------------------------------------------------


def test_a_private_index_of_the_spec(index, store, monkeypatch, caplog):
    index.user, index.password = "me", "s3cret-pass"
    monkeypatch.setenv("PIP_INDEX_URL", "")
    known = Indexes(index_url=index.url_with_password)
    lock = replace(served(index), indexes=known.strip_credentials())
    caplog.set_level(logging.DEBUG)
    error = fails(lock, store)
    assert len(error.context) == 2
    assert all("401" in line for line in error.context)
    assert len(fetch(lock, store, indexes=known)) == 2
    assert "s3cret-pass" not in caplog.text


# --- what is wrong -------------------------------------------------------------------------------


def test_a_file_that_differs_from_the_lock(index, store):
    lock = served(index)
    wrong = replace(lock.files[0], sha256=Digest("1" * 64))
    error = fails(replace(lock, files=(wrong, lock.files[1])), store)
    (line,) = error.context
    found = digest_file(index.folder / wrong.filename)
    assert wrong.filename in line
    assert f"expected sha256 {'1' * 64}, found {found}" in line
    assert "the lock is authoritative" in error.hint
    # What was right has arrived, what was wrong has not.
    assert [path.name for path in store.wheels.iterdir()] == [lock.files[1].filename]


def test_files_that_are_cut_short_or_gone_are_all_named(index, store):
    lock = served(index)
    short, gone = (index.folder / file.filename for file in lock.files)
    os.truncate(short, short.stat().st_size // 2)
    gone.unlink()
    error = fails(lock, store)
    assert [line.partition(":")[0].rpartition("/")[2] for line in error.context[1:]] == [gone.name]
    assert short.name in error.context[0]
    assert not list(store.wheels.iterdir())


def test_a_bad_file_in_the_store_is_replaced(index, store):
    lock = served(index)
    wheels = fetch(lock, store)
    bad, sha256 = wheels[0].path, wheels[0].sha256
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 1
    bad.write_bytes(content)
    (line,) = fails(lock, store, offline=True).context
    found = f"expected sha256 {sha256}, found {digest_file(bad)}"
    assert line == f"{bad.name}: differs from the lock: {found}"
    assert fetch(lock, store) == wheels
    assert digest_file(bad) == sha256


def test_no_network(store, monkeypatch, tmp_path):
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    url = "http://127.0.0.1:9/alpha-1.0-py3-none-any.whl"
    with pytest.raises(ResolveError, match="cannot be reached") as caught:
        fetch(lock_of(locked(make_wheel(tmp_path, "alpha"), url=url, path=None)), store)
    assert caught.value.hint


# --- sdists and local projects -------------------------------------------------------------------


@pytest.fixture
def sdist_lock(sdist, index_env):
    return lock_of(locked(sdist))


def test_an_sdist_is_built_once(sdist_lock, store, tmp_path):
    calls, runner = counting()
    (wheel,) = fetch(sdist_lock, store, run=runner)
    assert calls == ["wheel"]
    assert wheel.name == "from-source"
    assert wheel.version == Version("1.0")
    assert wheel.path.parent == store.built / sdist_lock.files[0].sha256
    assert wheel.sha256 == hashlib.sha256(wheel.path.read_bytes()).hexdigest()
    assert fetch(sdist_lock, store, offline=True, run=runner) == (wheel,)
    assert calls == ["wheel"]
    # A wheel that was tampered with is built again, and has the same bytes as before.
    wheel.path.write_bytes(wheel.path.read_bytes() + b"x")
    assert fetch(sdist_lock, store)[0].sha256 == wheel.sha256
    assert fetch(sdist_lock, Store(tmp_path / "two"))[0].sha256 == wheel.sha256


def test_a_failed_build_shows_its_end(index_env, wheelhouse, store):
    fault = "def build_wheel(*rest):\n    raise OSError('no compiler can do this')\n"
    with pytest.raises(WheelError) as caught:
        fetch(lock_of(locked(own_sdist(wheelhouse, "hopeless", fault))), store)
    problem, heading, *output, advice = caught.value.context
    assert problem.startswith("hopeless-1.0.tar.gz: ")
    assert heading == "the end of the build of hopeless 1.0:"
    assert output[-1] == "  | OSError: no compiler can do this"
    assert advice.startswith("hopeless: ")


def build_on_node(lock, store, folder, script):
    """Fetch a lock with builds on a node; the script stands for ``srun``."""
    launcher = folder / "srun"
    launcher.write_text(f"#!/bin/sh\n{script}\n")
    launcher.chmod(0o755)
    return fetch(lock, store, builds=BuildSettings(launcher=(str(launcher),)))


def test_on_a_node_nothing_is_fetched(sdist_lock, store, tmp_path):
    """The launcher takes the network away as a node has none."""
    log = tmp_path / "log"
    script = f'echo "$@" >> {log}\nexport PIP_INDEX_URL=http://127.0.0.1:9/\nexec "$@"'
    (wheel,) = build_on_node(sdist_lock, store, tmp_path, script)
    assert wheel.path.name == "from_source-1.0-py3-none-any.whl"
    (line,) = log.read_text().splitlines()
    assert "pip wheel" in line
    assert "--no-index" in line


def test_where_slurm_gives_no_node_no_build_has_failed(tmp_path, store):
    said = "srun: error: Unable to allocate resources: Invalid partition name specified"
    lock = lock_of(locked(own_sdist(tmp_path, "mine")))
    with pytest.raises(NoNodeError) as caught:
        build_on_node(lock, store, tmp_path, f"echo '{said}' >&2\nexit 1")
    assert caught.value.context == (said,)


def test_a_local_project_is_built_again_where_its_wheel_is_gone(index_env, store, tmp_path):
    (tmp_path / "project").mkdir()
    (wheel,) = fetch(lock_of(locked(own_sdist(tmp_path / "project", "mine"))), store)
    source, name = tmp_path / "project" / "mine", wheel.path.name
    entry = locked(wheel.path, path=tmp_path / "gone" / name)
    lock = lock_of(entry, path=source.parent / "pylock.toml", sources=((name, "mine"),))
    assert fetch(lock, Store(tmp_path / "one"))[0].sha256 == entry.sha256
    (source / "mine.py").write_text("CHANGED = 1\n")
    (line,) = fails(lock, Store(tmp_path / "two")).context
    assert "differs from the lock" in line
    shutil.rmtree(source)
    (line,) = fails(lock, Store(tmp_path / "three")).context
    assert "no such file or folder" in line


def test_a_digest_is_remembered_until_the_file_changes(store):
    path = store.wheels / "file"
    path.write_bytes(b"one")
    digest_cache = DigestCache(store)
    assert digest_cache.digest(path) == hashlib.sha256(b"one").hexdigest()
    digest_cache.save()
    record = (store.root / "checked.json").read_text()
    # Proof that the record is used: a wrong one is believed as long as the file is the same.
    (store.root / "checked.json").write_text(
        record.replace(hashlib.sha256(b"one").hexdigest(), "2" * 64)
    )
    assert DigestCache(store).digest(path) == "2" * 64
    path.write_bytes(b"two")
    assert DigestCache(store).digest(path) == hashlib.sha256(b"two").hexdigest()
    for damaged in ("", "[]", "{", '{"wheels/file": 3}', '{"wheels/file": [1]}'):
        (store.root / "checked.json").write_text(damaged)
        assert DigestCache(store).digest(path) == hashlib.sha256(b"two").hexdigest()
    path.unlink()
    assert DigestCache(store).digest(path) is None
