"""An unpacked environment is what pip would have installed, and runs wherever it lies."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.format.archive import BundleFile
from bundle.format.zstd import Decompress
from stager.pack.bundle import Packed
from tests.support.bundles import BASE_PYTHON, CLEAN, HERE, run_node, tree
from tests.support.needs import needs

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


@pytest.mark.parametrize("script", ["cli-tool", "cli-tool-gui", "schemes-shell"])
def test_scripts_say_what_pips_scripts_say(env: Path, installed: Path, script: str) -> None:
    assert run(env / "bin" / script) == run(installed / "bin" / script) != ""


def test_every_file_has_the_digest_in_the_index(
    env: Path, standard: Packed, decompress: Decompress
) -> None:
    found = tree(env)
    with BundleFile(str(standard.path)) as bundle:
        for layer in standard.manifest.layers:
            index = bundle.index(layer, bundle.head(layer), decompress)
            for entry in index.files:
                mode, data = found[entry.path]
                assert mode == f"{entry.mode:o}"
                assert isinstance(data, bytes)
                assert len(data) == entry.size
            for link in index.links:
                assert found[link.path] == ("link", link.target)
    assert (env / "project" / "inner" / "up").read_text() == "print('from the project')\n"
    assert (env / "project" / "empty").read_bytes() == b""
    assert run(env / "project" / "inner" / "tool.sh") == "tool"


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


def test_a_compiled_extension_works_wherever_it_lies(
    extension: Packed, program: Path, base: Path
) -> None:
    place = Path(run_node(program, "unpack", extension.path, base).stdout.strip())
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


def test_nothing_of_the_machine_is_in_it(env: Path, tmp_path: Path) -> None:
    """Only the link to the interpreter and pyvenv.cfg name a place outside."""
    for name, (kind, data) in tree(env).items():
        if name not in ("bin/python", "pyvenv.cfg"):
            assert not (kind == "link" and str(data).startswith("/")), name
            assert str(env).encode() not in (data if isinstance(data, bytes) else b""), name


def test_the_second_time_it_is_there(
    env: Path, standard: Packed, program: Path, tmp_path: Path
) -> None:
    base = env.parents[2]
    before = {path: path.stat().st_ctime_ns for path in env.rglob("*") if not path.is_symlink()}
    # The bundle's layers are not looked at any more: here the last one is damaged.
    copy = Path(shutil.copy(standard.path, tmp_path / "copy.tar"))
    with BundleFile(str(copy)) as bundle:
        start = bundle.frames_start(bundle.manifest.layers[-1])
    with copy.open("r+b") as handle:
        handle.seek(start)
        handle.write(b"damage!!")
    done = run_node(program, "unpack", copy, base, "--python", BASE_PYTHON)
    assert done.stdout.strip() == str(env)
    after = {path: path.stat().st_ctime_ns for path in env.rglob("*") if not path.is_symlink()}
    assert after == before


def test_an_interpreter_that_moved_is_found_again(
    env: Path, standard: Packed, program: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    place = Path(run_node(program, "unpack", standard.path, base).stdout.strip())
    (place / "bin" / "python").unlink()
    (place / "bin" / "python").symlink_to("/opt/gone/python")
    (place / "pyvenv.cfg").write_text("home = /opt/gone\n")
    again = run_node(program, "unpack", standard.path, base)
    assert again.stdout.strip() == str(place)
    assert ask(place, "import sys, alpha; print(sys.prefix)") == str(place)
    assert os.readlink(place / "bin" / "python") == BASE_PYTHON
    found = {path.relative_to(place) for path in place.rglob("*")}
    assert found == {path.relative_to(env) for path in env.rglob("*")}


@pytest.mark.parametrize("lost", ["pyvenv.cfg", "bin", ".stager/manifest.json", "everything"])
def test_an_environment_cleared_away_in_part_is_made_again(
    standard: Packed, program: Path, tmp_path: Path, lost: str
) -> None:
    """Cleaners of /tmp remove what has not been used for days, file by file."""
    base = tmp_path / "base"
    base.mkdir()
    place = Path(run_node(program, "unpack", standard.path, base).stdout.strip())
    before = tree(place)
    if lost == "everything":
        shutil.rmtree(place)
        place.mkdir()
    elif lost == "bin":
        shutil.rmtree(place / lost)
    else:
        (place / lost).unlink()
    again = run_node(program, "unpack", standard.path, base)
    assert again.stdout.strip() == str(place), again.stderr
    assert tree(place) == before
    assert os.listdir(base / f"stager-{os.geteuid()}" / "incoming") == []


def test_with_an_unusual_umask_it_is_the_same(
    env: Path, standard: Packed, program: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    argv = [sys.executable, "-I", "-S", program, "unpack", standard.path, base]
    line = 'umask 077; exec "$@"'
    place = Path(run("/bin/sh", "-c", line, "sh", *argv, env=CLEAN))
    assert {name: data for name, (_, data) in tree(place).items() if name != "bin/python"} == {
        name: data for name, (_, data) in tree(env).items() if name != "bin/python"
    }
    assert run(place / "bin" / "cli-tool") == "cli-tool ran"


def test_somebody_else_cannot_look_into_it(env: Path) -> None:
    needs("root")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "ls", env], capture_output=True, check=False
    )
    assert done.returncode != 0
    assert b"Permission denied" in done.stderr
