"""Making layers: several at a time, each once, the same bytes wherever and however it is done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from stager.core.errors import SpaceError, StagerError, WheelError
from stager.layers.layer_build import make_layers
from stager.layers.project import project_files
from stager.layers.source import LayerSource, layer_id
from stager.layers.tree import Tree, TreeFile
from tests.support.building import (
    HOST,
    OTHER,
    Recorder,
    contents,
    digests,
    layers_in,
    left_in_tmp,
    source_of,
    tree_of,
)
from tests.support.wheelhouse import DAMAGED, make_wheel, standard_set


def make(sources, store, jobs=2, target=HOST):
    """Make layers and give their digests; nothing may be left over."""
    made = layers_in(store, *sources, target=target, jobs=jobs)
    assert left_in_tmp(store) == []
    assert [store.layer(layer.id).stat().st_size for layer in made.layers] == [
        layer.size for layer in made.layers
    ]
    return [layer.head for layer in made.layers]


def damaged(folder, kind, name):
    """A damaged wheel under a name of its own: several of them do not share a file."""
    wheel = DAMAGED[kind](folder / kind)
    return wheel.rename(wheel.with_name(wheel.name.replace("bad", name)))


def test_a_second_time_makes_nothing(tmp_path, store):
    wheels = standard_set(tmp_path / "wheels")
    sources = [source_of(wheel) for wheel in wheels]
    recorder = Recorder()
    with store.lock():
        first = make_layers(sources, store=store, target=HOST, jobs=2, progress=recorder.step)
        twice = [*sources, *sources]
        again = make_layers(twice, store=store, target=HOST, jobs=2, progress=recorder.step)
    assert (first.built, first.reused) == (len(wheels), 0)
    assert (again.built, again.reused) == (0, len(wheels))
    assert again.layers == first.layers
    assert len(recorder.steps) == len(wheels)
    assert recorder.steps[-1].endswith(f"{len(wheels)}/{len(wheels)}")
    assert {step.split(" ")[0] for step in recorder.steps} == {str(s.name) for s in sources}


def test_several_bad_wheels_are_all_reported_and_the_good_ones_kept(tmp_path, store):
    kinds = ("no-record", "wrong-hash", "truncated", "symlink")
    bad = [damaged(tmp_path, kind, f"bad{n}") for n, kind in enumerate(kinds)]
    good = standard_set(tmp_path / "wheels")
    sources = [source_of(wheel) for wheel in (*bad, *good)]
    with pytest.raises(WheelError, match="4 layers cannot be built") as caught:
        layers_in(store, *sources, jobs=2)
    for wheel in bad:
        assert any(wheel.name in line for line in caught.value.context)
    assert caught.value.hint
    assert {path.name for path in store.layers.iterdir()} == {
        f"{layer_id(source_of(wheel), HOST)}.tar.zst" for wheel in good
    }
    assert left_in_tmp(store) == []


@pytest.mark.parametrize("keep", [0, 10, 40, -1])
def test_a_layer_that_is_cut_short_is_made_again(keep, tmp_path, store):
    sources = [source_of(wheel) for wheel in standard_set(tmp_path / "wheels")]
    make(sources, store)
    before = digests(store.layers)
    victim = store.layer(layer_id(sources[0], HOST))
    os.truncate(victim, keep if keep >= 0 else victim.stat().st_size - 1)
    made = layers_in(store, *sources, jobs=2)
    assert made.built == 1
    assert digests(store.layers) == before


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text("print('here')\n")
    (made / "data.csv").write_text("1,2\n")
    return made


def test_a_project_gets_bytecode_and_an_asset_does_not(folder, store):
    project = LayerSource.from_tree("project", "p", tree_of(folder), "project")
    asset = LayerSource.from_tree("asset", "a", tree_of(folder), "assets")
    make([project, asset], store)
    names = {"data.csv", "train.py"}
    cached = f"__pycache__/train.cpython-{HOST.python.replace('.', '')}.pyc"
    for source, prefix, there in ((project, "project", {*names, cached}), (asset, "assets", names)):
        found = set(contents(store.layer(layer_id(source, HOST))))
        assert found == {f"{prefix}/{name}" for name in there}


@pytest.mark.parametrize("name", ["train.py", "data.csv"])
def test_a_file_that_changes_meanwhile_is_noticed(name, folder, store):
    source = LayerSource.from_tree("project", "mine", project_files(folder, []), "project")
    (folder / name).write_text("something else\n")
    with pytest.raises(StagerError, match="project mine changed") as caught:
        layers_in(store, source)
    assert f"packed: {name}" in caught.value.message
    assert "project.exclude" in caught.value.hint
    (folder / name).unlink()
    with pytest.raises(StagerError, match=f"{name}: No such file"):
        layers_in(store, source)
    assert list(store.layers.iterdir()) == []


def test_without_bytecode_there_is_a_note_that_says_what_it_costs(tmp_path, store):
    sources = [source_of(make_wheel(tmp_path, "alpha"))]
    there = layers_in(store, *sources)
    other = layers_in(store, *sources, target=OTHER)
    assert there.notes == ()
    (note,) = other.notes
    for part in (HOST.python, OTHER.python, "twice as long"):
        assert part in note
    assert there.layers[0].id != other.layers[0].id


def test_room_is_asked_for_before_anything_is_written(tmp_path, store):
    wheel = make_wheel(tmp_path, "alpha")
    huge = LayerSource(
        kind="wheel", name="alpha", digest=source_of(wheel).digest, wheel=wheel, size=1 << 60
    )
    with pytest.raises(SpaceError, match="the layers: need"):
        layers_in(store, huge)
    assert list(store.layers.iterdir()) == []


def blocked_source(tmp_path):
    """A source whose layer is never done: reading it waits for a writer that does not come."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    digest = source_of(make_wheel(tmp_path, "alpha")).digest
    file = TreeFile(path="pipe", source=pipe, mode=0o644, size=0)
    tree = Tree(files=(file,), links=(), skipped=())
    return LayerSource(
        kind="asset", name="stuck", digest=digest, tree=tree, prefix="assets", size=1
    )


def layer_processes():
    """The processes that make layers for this one: grandchildren, under the fork server."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(status[1])
    return [pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()]


def test_a_killed_process_is_an_error_with_its_status(tmp_path, store):
    over = threading.Event()

    def kill():
        while not over.wait(0.1):
            for process in layer_processes():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(StagerError, match="stuck ended with status -9") as caught:
        layers_in(store, blocked_source(tmp_path))
    over.set()
    killer.join()
    assert "--jobs 1" in caught.value.hint
    assert left_in_tmp(store) == []


def test_a_long_temporary_directory(tmp_path):
    """The socket of multiprocessing, which lies there, cannot have so long a path (unix(7))."""
    folder = tmp_path / ("t" * 120)
    folder.mkdir()
    make_wheel(tmp_path, "alpha")
    code = (
        "import pathlib, sys\n"
        "from stager.core.store import Store\n"
        "from tests.stager.layers.test_layer_build import make, source_of\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "print(len(make([source_of(one) for one in here.glob('*.whl')], Store(here / 'store'))))\n"
    )
    argv, env = [sys.executable, "-c", code, str(tmp_path)], {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")
