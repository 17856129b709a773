"""The proof that nothing is missing: what would fail on a node fails here, all of it at once."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from bundle.protocol.job import Requires
from bundle.system import processes
from stager.core.errors import BundleError, SpaceError
from stager.core.values import Target
from stager.pack.proof import Proof, Wanted, list_unmet, prove
from tests.support.building import HOST, Recorder, layers_of, left_in_tmp
from tests.support.needs import needs
from tests.support.wheelhouse import make_wheel


def refusal(project):
    with pytest.raises(BundleError) as caught:
        project.build(prove=True)
    assert left_in_tmp(project.store) == []
    assert list(project.store.bundles.iterdir()) == [], "a bundle that would fail got a name"
    return caught.value


def program_on_path(monkeypatch, path, shell):
    """Write a program that the system finds first."""
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{shell}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.fixture
def started(monkeypatch):
    """The commands that this process has started."""
    commands: list[object] = []

    begin = processes.Process.__init__

    def note(self, argv, *more, **settings):
        commands.append(argv)
        begin(self, argv, *more, **settings)

    monkeypatch.setattr(processes.Process, "__init__", note)
    return commands


def test_a_complete_environment_is_proved_once(project, started):
    first, again, changed = Recorder(), Recorder(), Recorder()
    built = project.build(first, prove=True)
    assert built.proof.done
    assert any("namespace with no network" in note or "nowhere" in note for note in first.notes)
    assert started != []
    assert first.steps[-1] == "importing alpha 1/1"
    started.clear()
    assert project.build(again, prove=True).proof == Proof(done=True, how=again.notes[-1])
    assert started == [], "neither the proof nor anything else needs a process"
    (project.root / "train.py").write_text("print('changed')\n")
    assert project.build(changed, prove=True).made.built == 1
    for recorder in (again, changed):
        assert recorder.notes[-1] == "nothing is missing: proved before, with the same packages"
    assert left_in_tmp(project.store) == []


def test_everything_that_is_missing_is_named(project, tmp_path):
    wheels = [
        make_wheel(tmp_path, "one", requires=["gone>=1", "two>=2", 'not-here; os_name == "nt"']),
        make_wheel(tmp_path, "two", requires=["lost"], files={"two.py": "import nowhere\n"}),
    ]
    project.locked(*wheels)
    text = "\n".join(refusal(project).context)
    for line in ("gone is missing; one needs it", "two is 1.0; one needs two>=2", "lost is miss"):
        assert line in text
    assert "two: the module cannot be imported: ModuleNotFoundError: No module named" in text
    assert "not-here" not in text


def test_pip_and_setuptools_together(project, wheelhouse):
    """The finder of setuptools, once it was asked for pip, prevents the import of setuptools."""
    hack = (
        "import sys\nasked = []\n"
        "class Finder:\n    def find_spec(self, name, path, target=None):\n"
        "        asked.append(name)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    files = {
        "distutils-precedence.pth": "import _distutils_hack\n",
        "_distutils_hack/__init__.py": hack,
        "setuptools/__init__.py": "import _distutils_hack as h\nassert 'pip' not in h.asked\n",
    }
    make_wheel(wheelhouse, "setuptools", files=files)
    make_wheel(wheelhouse, "pip")
    assert project.settings("pip", "setuptools").build(prove=True).proof.done


def test_an_import_that_needs_the_network_fails(project, wheelhouse):
    needs("namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5).close()\n"
        make_wheel(wheelhouse, "needy", files={"needy.py": code})
        project.settings("needy")
        (line,) = refusal(project).context
        assert line.startswith("needy: the module cannot be imported: OSError: [Errno 101]")
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_where_no_namespace_is_allowed_proxies_lead_nowhere(
    project, wheelhouse, tmp_path, monkeypatch
):
    program_on_path(monkeypatch, tmp_path / "bin" / "unshare", "exit 1")
    monkeypatch.setenv("NO_PROXY", "*")
    code = "from urllib.request import urlopen\nurlopen('http://example.com/', timeout=5)\n"
    make_wheel(wheelhouse, "needy", files={"needy.py": code})
    project.settings("needy")
    (line,) = refusal(project).context
    assert "Connection refused" in line
    recorder = Recorder()
    assert project.settings("alpha").build(recorder, prove=True).proof
    assert recorder.notes[-1].endswith("with all proxies set to an address without a server")


def proof_for(project, packed, *requirements, **change):
    """Prove a bundle as one for another target."""
    target = replace(HOST, **change)
    libc, newest = target.libc
    needs = Requires(target.python, target.machine, libc, ".".join(map(str, newest)))
    manifest, wanted = (
        replace(packed.manifest, requires=needs),
        Wanted(requirements=list(requirements)),
    )
    told = {"target": target, "wanted": wanted, "step": Recorder().step}
    return prove(packed.path, manifest, store=project.store, **told)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"platform": "manylinux_2_28_riscv64"}, "this machine is not riscv64 with glibc"),
        ({"platform": f"musllinux_1_2_{HOST.machine}"}, f"not {HOST.machine} with musl"),
        ({"platform": f"manylinux_2_99_{HOST.machine}"}, "glibc is older than 2.99 here"),
        ({"python": "3.99"}, "there is no Python 3.99 here"),
        ({"python": "3.98"}, "there is no Python 3.98 here"),
    ],
)
def test_what_cannot_run_here_is_not_proved_and_says_why(
    change, why, project, tmp_path, monkeypatch
):
    # As a version manager leaves on PATH.
    said = "echo 'python3.98: command not found' >&2\nexit 127"
    program_on_path(monkeypatch, tmp_path / "bin" / "python3.98", said)
    proof = proof_for(project, project.build().packed, **change)
    assert not proof.done
    assert proof.how.endswith(why)
    assert list(project.store.proofs.iterdir()) == []


def test_what_cannot_run_here_is_refused_by_the_metadata_of_its_packages(project, tmp_path):
    wheels = [make_wheel(tmp_path, "one", requires=["gone>=1", "two"]), make_wheel(tmp_path, "two")]
    packed = project.locked(*wheels).build().packed
    with pytest.raises(BundleError, match="the environment is not complete") as caught:
        proof_for(project, packed, "one", "three", platform="manylinux_2_28_riscv64")
    assert caught.value.context == (
        "gone is missing; one needs it",
        "three is missing; environment.requirements needs it",
    )
    assert left_in_tmp(project.store) == []


def test_too_little_room_for_the_proof(project, monkeypatch):
    built = project.build()
    need = built.packed.manifest.unpacked_size
    state = list(os.statvfs(project.store.root))
    state[4] = need // state[1]  # f_bavail, in units of f_frsize: what the files hold, no more
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(state))
    with pytest.raises(SpaceError, match="the proof that nothing is missing: need"):
        project.build(prove=True)
    assert built.packed.path.exists(), "a bundle that was there before is not removed"


_ALL = (
    "Provides-Extra: all\nProvides-Extra: fast\nRequires-Dist: lib[fast] ; extra == 'all'\n"
    "Requires-Dist: speed>=2 ; extra == 'fast'\n"
)


@pytest.mark.parametrize(
    ("wheels", "asked", "unmet"),
    [
        # Extras count where somebody asks for them, and extras of extras.
        ({"user": ["lib"]}, ["user"], []),
        ({}, ["lib[fast]"], ["speed is 1.0; lib needs speed>=2"]),
        ({}, ["lib[all]"], ["speed is 1.0; lib needs speed>=2"]),
        ({"racer": ["lib[fast]"]}, [], ["speed is 1.0; lib needs speed>=2"]),
        # Names are normalized, and pre-releases count.
        ({"user": ["my-odd.name>=1"]}, ["MY_odd-name", "user"], []),
        # What the user asks for is checked, too.
        (
            {},
            ["lib==2", "other", 'nt; sys_platform == "win32"'],
            [
                "lib is 1.0; environment.requirements needs lib==2",
                "other is missing; environment.requirements needs it",
            ],
        ),
        ({"old": ["what (is) this"]}, ["old"], []),  # which no resolver can read either
    ],
)
def test_requirements_in_metadata(tmp_path, wheels, asked, unmet):
    make_wheel(tmp_path, "lib", metadata_extra=_ALL)
    make_wheel(tmp_path, "speed")
    make_wheel(tmp_path, "My.Odd_Name", "2.0rc1", spelled="My.Odd_Name")
    for name, requires in wheels.items():
        make_wheel(tmp_path, name, requires=requires)
    site = layers_of(tmp_path / "env", *tmp_path.glob("*.whl"))
    assert list_unmet(site, asked, HOST) == unmet


def test_markers_are_those_of_the_target(tmp_path):
    wheel = make_wheel(tmp_path, "m", requires=['arm; platform_machine == "aarch64"',
                                                'intel; platform_machine == "x86_64"'])  # fmt: skip
    site = layers_of(tmp_path / "env", wheel)
    for machine, name in (("aarch64", "arm"), ("x86_64", "intel")):
        target = Target(python=HOST.python, platform=f"manylinux_2_28_{machine}")
        assert list_unmet(site, [], target) == [f"{name} is missing; m needs it"]
