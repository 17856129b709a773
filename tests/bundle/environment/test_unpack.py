"""An unpacked environment is what pip would have installed, and runs wherever it lies."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bundle.format.archive import BundleFile
from bundle.protocol.digest import Digest
from stager.pack.bundle import Packed
from tests.support.bundles import (
    BASE_PYTHON,
    CLEAN,
    HERE,
    OWN,
    forge,
    left_over,
    refuses,
    stage,
    tree,
)
from tests.support.gated_program import gated
from tests.support.namespaces import namespace
from tests.support.needs import needs
from tests.support.processes import until

PYTHON = f"python{HERE.python}"
SITE = f"lib/{PYTHON}/site-packages"
QUIET = {**CLEAN, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run(*argv: object, env: dict[str, str] = QUIET, cwd: Path = Path("/")) -> str:
    done = subprocess.run(
        list(map(str, argv)), env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ask(env: Path, code: str, **variables: str) -> str:
    return run(env / "bin" / "python", "-c", code, env={**QUIET, **variables})


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain virtual environment into which pip has installed the same wheels."""
    folder = tmp_path_factory.mktemp("pip") / "venv"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    argv = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q"]
    argv += ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", *wheels]
    subprocess.run(list(map(str, argv)), check=True)
    return folder


def content(folder: Path) -> dict[str, tuple[str, object]]:
    """What wheels put there, without what each installer says about itself."""
    own = {"INSTALLER", "REQUESTED", "direct_url.json", "RECORD"}
    found = {}
    for name, what in tree(folder).items():
        path = Path(name)
        first = path.parts[0]
        venv = first in ("project", ".stager", "pyvenv.cfg", "pkgs", "lib64")
        activation = first == "bin" and path.name.startswith(("python", "activate", "Activate"))
        if venv or activation or path.name in own or "__pycache__" in path.parts:
            continue
        found[name] = what
    return found


def test_the_files_are_those_that_pip_installs(env: Path, installed: Path) -> None:
    ours, pips = content(env), content(installed)
    hooks = [f"{SITE}/_stager_{name}" for name in ("imports", "patches")]
    extra = {f"{hook}.{ending}" for hook in hooks for ending in ("pth", "py")}
    extra.add(f"{SITE}/_stager_hub_datasets.py")
    assert set(ours) - extra == set(pips)
    assert len(pips) > 30
    for name, (mode, data) in pips.items():
        assert ours[name][0] == mode, name
        if not name.startswith("bin/") or name == "bin/schemes-shell":  # first lines differ
            assert ours[name][1] == data, name
    assert (env / "project" / "inner" / "up").read_text() == "print('from the project')\n"
    assert (env / "project" / "empty").read_bytes() == b""
    assert run(env / "project" / "inner" / "tool.sh") == "tool"


@pytest.mark.parametrize("script", ["cli-tool", "cli-tool-gui", "schemes-shell"])
def test_scripts_say_what_pips_scripts_say(env: Path, installed: Path, script: str) -> None:
    assert run(env / "bin" / script) == run(installed / "bin" / script) != ""


def test_the_bundle_is_noted_in_the_environment(env: Path, standard: Packed) -> None:
    assert env.name == standard.manifest.id
    assert (env / ".stager" / "manifest.json").read_bytes() == standard.manifest.to_bytes()
    heads = {path.name for path in (env / ".stager" / "layers").iterdir()}
    assert heads == {layer.id for layer in standard.manifest.layers}
    assert env.stat().st_mode & 0o777 == 0o700


def test_it_is_a_virtual_environment(env: Path) -> None:
    prefix, base, site = ask(
        env,
        "import site, sys; print(sys.prefix); print(sys.base_prefix); print(site.ENABLE_USER_SITE)",
    ).splitlines()
    assert (prefix, base, site) == (str(env), sys.base_prefix, "False")
    assert os.readlink(env / "bin" / "python") == BASE_PYTHON
    for name in ("python3", PYTHON):
        assert os.readlink(env / "bin" / name) == "python"
    assert (
        (env / "pkgs").resolve()
        == env / SITE
        == (env / "lib64" / PYTHON / "site-packages").resolve()
    )


def test_what_the_wheels_brought_works(env: Path) -> None:
    code = """
import json, os, sysconfig
import from_pth, schemes_pure, schemes_plat, shared_ns.one, shared_ns.two
from importlib import metadata
print(json.dumps([
    from_pth.VALUE, os.environ["PTH_PKG_RAN"], schemes_pure.WHERE,
    schemes_plat.WHERE, shared_ns.one.WHO, shared_ns.two.WHO, len(shared_ns.__path__),
    metadata.version("my-odd-name"), metadata.distribution("schemes").read_text("INSTALLER"),
    sorted(e.name for e in metadata.entry_points(group="console_scripts")),
    [str(f) for f in metadata.files("schemes") if not f.locate().exists()],
]))
"""
    assert json.loads(ask(env, code)) == [
        "reached through a .pth", "1", "purelib", "platlib", "one", "two", 1,
        "1.0", "stager\n", ["cli-tool"], [],
    ]  # fmt: skip


def test_bytecode_came_with_it_and_is_used(env: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(env, copy, symlinks=True)
    source = copy / SITE / "alpha" / "__init__.py"
    cached = source.parent / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    assert cached.read_bytes()[4:8] == b"\1\0\0\0"  # unchecked and by hash, PEP 552
    source.write_text("VERSION = 'compiled anew'\n")
    assert ask(copy, "import alpha; print(alpha.VERSION)") == "1.0"
    cached.unlink()
    assert ask(copy, "import alpha; print(alpha.VERSION)") == "compiled anew"


def test_a_compiled_extension_works_wherever_it_lies(extension: Packed, base: Path) -> None:
    place = Path(stage(extension, base).path)
    code = "import native_ext; print(native_ext.answer(), native_ext.__file__)"
    assert ask(place, code).startswith(f"42 {place}/")
    moved = base / "moved"
    place.rename(moved)
    assert ask(moved, code).startswith(f"42 {moved}/")


@pytest.mark.parametrize("how", ["moved", "copied", "through-a-link"])
def test_it_runs_from_wherever_it_lies(env: Path, tmp_path: Path, how: str) -> None:
    place = tmp_path / "with a blank"
    if how == "through-a-link":
        place.symlink_to(env)
    else:
        shutil.copytree(env, tmp_path / "first" if how == "moved" else place, symlinks=True)
    if how == "moved":
        (tmp_path / "first").rename(place)
    code = "import sys, alpha; print(sys.prefix); print(alpha.__file__)"
    prefix, module = ask(place, code).splitlines()
    assert prefix == str(place)
    assert module.startswith(f"{place}/")
    assert run(place / "bin" / "cli-tool") == "cli-tool ran"
    real = env if how == "through-a-link" else place
    assert run(place / "bin" / "schemes-script", cwd=tmp_path) == f"schemes {real}"
    linked = tmp_path / "cli"
    linked.symlink_to(place / "bin" / "schemes-script")
    assert run(linked) == f"schemes {real}"


def test_decoys_outside_are_not_reached(env: Path, tmp_path: Path) -> None:
    """Its own alpha counts, whatever lies in the user's site; PYTHONPATH is the launcher's job."""
    user = tmp_path / "home" / ".local" / "lib" / PYTHON / "site-packages"
    user.mkdir(parents=True)
    (user / "alpha.py").write_text("raise SystemExit('the decoy')\n")
    (user / "only_there.py").touch()
    home = str(tmp_path / "home")
    assert ask(env, "import alpha; print(alpha.VERSION)", HOME=home) == "1.0"
    code = "import importlib.util as u; print(u.find_spec('only_there'), u.find_spec('pytest'))"
    assert ask(env, code, HOME=home) == "None None"


def test_the_second_time_it_is_there(env: Path, standard: Packed, tmp_path: Path) -> None:
    base = env.parents[2]
    before = {path: path.stat().st_ctime_ns for path in env.rglob("*") if not path.is_symlink()}
    # The bundle's layers are not looked at any more: here the last one is damaged.
    copy = Path(shutil.copy(standard.path, tmp_path / "copy.tar"))
    with BundleFile(str(copy)) as bundle:
        start = bundle.offset(bundle.manifest.layers[-1].member)
    with copy.open("r+b") as handle:
        handle.seek(start)
        handle.write(b"damage!!")
    assert stage(copy, base).path == str(env)
    after = {path: path.stat().st_ctime_ns for path in env.rglob("*") if not path.is_symlink()}
    assert after == before


def test_an_interpreter_that_moved_is_found_again(env: Path, standard: Packed, base: Path) -> None:
    place = Path(stage(standard, base).path)
    (place / "bin" / "python").unlink()
    (place / "bin" / "python").symlink_to("/opt/gone/python")
    (place / "pyvenv.cfg").write_text("home = /opt/gone\n")
    assert stage(standard, base).path == str(place)
    assert ask(place, "import sys, alpha; print(sys.prefix)") == str(place)
    assert os.readlink(place / "bin" / "python") == BASE_PYTHON
    found = {path.relative_to(place) for path in place.rglob("*")}
    assert found == {path.relative_to(env) for path in env.rglob("*")}


def test_with_an_unusual_umask_it_is_the_same(
    env: Path, standard: Packed, program: Path, base: Path
) -> None:
    argv = [sys.executable, "-I", "-S", program, "unpack", standard.path, base]
    line = 'umask 077; exec "$@"'
    place = Path(run("/bin/sh", "-c", line, "sh", *argv, env=CLEAN))
    (ours, theirs) = (
        {name: data for name, (_, data) in tree(folder).items() if name != "bin/python"}
        for folder in (place, env)
    )
    assert ours == theirs


def test_somebody_else_cannot_look_into_it(env: Path) -> None:
    needs("root")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "ls", env], capture_output=True, check=False
    )
    assert done.returncode != 0
    assert b"Permission denied" in done.stderr


# --- Unpacking that is interrupted, refused or out of room leaves nothing, and the ne ------------


def start(program: Path, bundle: Path, base: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", program, "unpack", bundle, base, "--python", BASE_PYTHON]
    return subprocess.Popen(
        list(map(str, argv)),
        env=CLEAN,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_of_eight_at_a_time_one_writes(standard: Packed, program: Path, base: Path) -> None:
    (base / OWN).mkdir(mode=0o700)
    for name in ("incoming", "locks", "envs"):
        (base / OWN / name).mkdir()
    code = f"""
import json, sys
sys.path.insert(0, {str(program)!r})
from bundle.environment import unpack
sys.stdin.readline()
made = unpack.unpack({str(standard.path)!r}, root={str(base / OWN)!r},
    expected={standard.manifest.id!r}, python={BASE_PYTHON!r}, processes=2)
print(json.dumps(made._asdict()))
"""
    gate, open_gate = os.pipe()
    running = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], stdin=gate, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    os.close(gate)
    time.sleep(0.5)  # most have started and wait at the gate
    os.write(open_gate, b"\n" * 8)
    os.close(open_gate)
    answers = [json.loads(one.communicate(timeout=300)[0]) for one in running]
    assert [one.returncode for one in running] == [0] * 8
    assert {answer["path"] for answer in answers} == {
        str(base / OWN / "envs" / standard.manifest.id)
    }
    writers = [answer for answer in answers if not answer["reused"]]
    assert [answer["written"] for answer in writers] == [standard.manifest.files]
    assert sum(answer["written"] + answer["linked"] for answer in answers if answer["reused"]) == 0
    assert left_over(base) == [f"envs/{standard.manifest.id}"]


def test_killed_at_any_moment_it_can_be_done_again(
    many: Packed, program: Path, base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    slow = gated(program, tmp_path, tmp_path / "no gate")
    started = time.monotonic()
    whole = Path(stage(many, other).path)
    seconds = time.monotonic() - started
    expected, final = tree(whole), base / OWN / "envs" / many.manifest.id
    rng, unfinished = random.Random(3), 0
    for attempt in range(6):
        running = start(program if attempt % 3 else slow, many.path, base)
        if attempt % 3:
            time.sleep(rng.uniform(0.1, 1.0) * seconds)
        else:  # some surely when there is something to leave half done
            assert until(lambda: any("incoming/" in name for name in left_over(base)), pause=0.01)
        if rng.random() < 0.5:
            running.kill()  # its children find out for themselves
        else:
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate(timeout=300)
        found = left_over(base)
        unfinished += any(name.startswith("incoming/") for name in found)
        if f"envs/{many.manifest.id}" in found:
            assert tree(final) == expected
            shutil.rmtree(final)
    assert unfinished >= 2
    assert stage(many, base).path == str(final)
    assert tree(final) == expected
    assert left_over(base) == [f"envs/{many.manifest.id}"]


def test_what_killed_ones_left_is_swept_by_another_bundle(
    many: Packed, standard: Packed, base: Path
) -> None:
    (base / OWN / "incoming").mkdir(parents=True)
    (base / OWN).chmod(0o700)
    dead = base / OWN / "incoming" / f"{many.manifest.id}.abc"
    alive = base / OWN / "incoming" / f"{Digest.of(b'alive')}.abc"
    foreign = base / OWN / "incoming" / "something-else"
    for folder in (dead, alive, foreign):
        (folder / "env" / "lib").mkdir(parents=True)
    (base / OWN / "locks").mkdir()
    with (base / OWN / "locks" / f"{Digest.of(b'alive')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody is making this one
        stage(standard, base)
    assert left_over(base) == [
        f"envs/{standard.manifest.id}",
        f"incoming/{alive.name}",
        "incoming/something-else",
    ]


def test_one_in_use_is_not_waited_for_and_its_open_files_stay(
    standard: Packed, program: Path, base: Path
) -> None:
    """The job that uses it may last for days; what it opens from now on is sound."""
    place = Path(stage(standard, base).path)
    (place / "pyvenv.cfg").unlink()
    tool = place / "bin" / "cli-tool"
    lock = base / OWN / "locks" / f"{standard.manifest.id}.lock"
    with lock.open() as held, tool.open() as opened:
        fcntl.flock(held, fcntl.LOCK_SH)
        running = start(program, standard.path, base)
        assert running.communicate(timeout=300)[0].strip() == str(place)
        assert opened.read() == tool.read_text()
    assert (place / "pyvenv.cfg").exists()
    assert left_over(base) == [f"envs/{standard.manifest.id}"]


# --- damage and forgery --------------------------------------------------------------------------


def test_damage_anywhere_leaves_nothing(single: Packed, base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(single.path, tmp_path / "copy.tar"))
    offset, places = 0, []
    for _, length in single.manifest.members():
        places += [offset + 100, offset + 512 + length // 2]
        offset += 512 + length + -length % 512
    places.append(offset + 1)
    for place in places:
        with copy.open("r+b") as handle:
            handle.seek(place)
            byte = handle.read(1)
            handle.seek(place)
            handle.write(bytes([byte[0] ^ 1]))
        assert "damaged" in refuses(copy, base), place
        with copy.open("r+b") as handle:
            handle.seek(place)
            handle.write(byte)
    stage(copy, base)


def file(path: str) -> list[Any]:
    return [path, 0, 0o644, Digest.of(b""), 512]


HOSTILE = {
    "parent": {"files": [file("../escaped")]},
    "absolute": {"files": [file("/tmp/escaped")]},
    "setuid": {"files": [["bin/sh", 0, 0o4755, Digest.of(b""), 512]]},
    "link-outside": {"files": [], "links": [["project/out", "../../../../escaped"]]},
    "link-then-file": {"files": [file("lib/l/escaped")], "links": [["lib/l", "x"]]},
    "lib-is-a-link": {"files": [], "links": [["lib", "project"]]},
    "interpreter": {"files": [file("bin/python")]},
    "manifest": {"files": [file(".stager/manifest.json")]},
    "long-name": {"files": [file("lib/" + "x" * 300)]},
}
"""Some of what test_layer.py and test_listing.py have; nothing of it may be left."""


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_layers_are_refused(single: Packed, base: Path, tmp_path: Path, what: str) -> None:
    path = forge(single.path, tmp_path / "forged.tar", index=lambda raw: raw.update(HOSTILE[what]))
    refuses(path, base)
    assert sorted(path.name for path in tmp_path.rglob("*escaped*")) == []
    assert not Path("/tmp/escaped").exists()


# --- Where an environment cannot be put: file systems, owners, links, and how it is s ------------


def in_namespace(shell: str, program: Path, bundle: Path, base: Path) -> tuple[int, str, list[str]]:
    """Unpack after ``shell`` has mounted what it likes: exit status, message, what is left."""
    code = f"""
import os, subprocess
argv = {[sys.executable, "-I", "-S", str(program), "unpack", str(bundle), str(base)]!r}
done = subprocess.run(
    [*argv, "--python", {BASE_PYTHON!r}], env={CLEAN!r}, capture_output=True, text=True)
own = os.path.join({str(base)!r}, {OWN!r})
left = [os.path.join(f, n) for f in ("envs", "incoming")
        for n in (os.listdir(os.path.join(own, f)) if os.path.isdir(os.path.join(own, f)) else ())]
print(json.dumps([done.returncode, done.stderr, left]))
"""
    answer = namespace("-m", shell, code)
    assert isinstance(answer, Sequence)
    assert "Traceback" not in answer[1]
    return answer[0], answer[1], answer[2]


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        ("-o size=80m", ""),  # enough
        ("-o size=20m", "are free"),  # refused before anything is written
        ("-o nr_inodes=1000", "inodes, 9"),
        ("-o noexec", "mounted noexec"),
        ("-o ro", "mounted read-only"),
    ],
)
def test_a_file_system_with_too_little_is_refused(
    many: Packed, program: Path, base: Path, mount: str, says: str
) -> None:
    code, said, left = in_namespace(f"mount -t tmpfs {mount} none {base}", program, many.path, base)
    if not says:
        assert (code, said, left) == (0, "", [f"envs/{many.manifest.id}"])
        return
    assert (code, left) == (1, [])
    for text in (says, "node-root", str(base)):
        assert text in said


def test_a_lock_that_is_a_link_is_not_followed(
    standard: Packed, base: Path, tmp_path: Path
) -> None:
    (base / OWN / "locks").mkdir(parents=True)
    (base / OWN / "locks" / f"{standard.manifest.id}.lock").symlink_to(tmp_path / "victim")
    assert "cannot be written" in refuses(standard.path, base)
    assert not (tmp_path / "victim").exists()


def test_where_child_processes_cannot_be_waited_for(
    standard: Packed, program: Path, base: Path
) -> None:
    """SIGCHLD ignored by whoever started it, which passes through exec: children vanish."""
    line = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    line += "os.execv(sys.argv[1], sys.argv[1:])"
    argv = [sys.executable, "-c", line, sys.executable, "-I", "-S", program, "unpack"]
    done = subprocess.run(
        [*map(str, argv), standard.path, base], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
