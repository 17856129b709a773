"""Who may do what in an offline root: its own mode decides, whatever anybody's umask is."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stager.core.store import Store
from stager.core.values import Target
from stager.layers.layer_build import make_layers
from tests.support.building import STAGER, Project, left_behind, source_of
from tests.support.needs import needs
from tests.support.processes import run, start
from tests.support.users import GROUP, as_user
from tests.support.wheelhouse import make_wheel

REPO = Path(__file__).resolve().parents[2]
USERS = (52351, 52352)


def modes(root: Path) -> set[tuple[str, str]]:
    """What kinds of modes there are below a root: of files, and of directories."""
    found = set()
    for path in root.rglob("*"):
        kind = "folder" if path.is_dir() else "file"
        found.add((kind, oct(stat.S_IMODE(path.lstat().st_mode))))
    return found


@pytest.fixture(params=["0", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(int(request.param, 8))
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("root", "folder", "file"),
    [(None, 0o700, 0o600), (0o750, 0o750, 0o640), (0o755, 0o755, 0o644), (0o2770, 0o2770, 0o660)],
)
def test_the_roots_mode_decides(root: int | None, folder: int, file: int, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    if root is not None:
        store.root.mkdir()
        store.root.chmod(root)
    with store.lock():
        source = source_of(make_wheel(tmp_path / "wheels", "alpha"))
        make_layers([source], store=store, target=Target.from_host(), jobs=1)
        with store.publish(store.bundles / "a") as partial:
            partial.write_text("x")
        with store.scratch("new") as scratch:
            assert stat.S_IMODE(scratch.stat().st_mode) == folder
    assert stat.S_IMODE(store.root.stat().st_mode) == (0o700 if root is None else root)
    assert modes(store.root) == {("folder", oct(folder)), ("file", oct(file))}


def test_a_store_that_is_shared_later_is_opened_by_its_next_use(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with store.lock(), store.publish(store.bundles / "a") as partial:
        partial.write_text("x")
    store.root.chmod(0o2770)
    with store.lock():
        pass
    assert stat.S_IMODE((store.root / ".lock").stat().st_mode) == 0o660
    assert stat.S_IMODE(store.bundles.stat().st_mode) == 0o2770


# --- two users of one group ----------------------------------------------------------------------


@pytest.fixture
def shared(zstandard_wheel: Path, project: Project) -> Iterator[Path]:
    """A folder that everybody can reach, with a store that a group shares and all it needs."""
    needs("root")
    place = Path(tempfile.mkdtemp(prefix="stager-shared-"))
    place.chmod(0o755)
    root = place / "store"
    root.mkdir()
    os.chown(root, -1, GROUP)
    root.chmod(0o2770)
    wheels = place / "wheels"
    wheels.mkdir()
    for wheel in (zstandard_wheel, make_wheel(place / "made", "alpha")):
        shutil.copy2(wheel, wheels)
    for user in USERS:
        home = place / str(user)
        home.mkdir()
        lines = f'requirements = ["alpha"]\n[project]\nname = "of-{user}"\n'
        (home / "stager.toml").write_text(f"[environment]\n{lines}")
        (home / "train.py").write_text(f"print({user})\n")
        os.chown(home, user, user)
    yield place
    shutil.rmtree(place)


def build(shared: Path, user: int) -> subprocess.Popen[str]:
    """A build of a user's own project in the shared store, with a umask that shuts others out."""
    argv = ["sh", "-c", 'umask 077; exec "$@"', "sh", *STAGER, "build", "--json"]
    argv += ["--no-prove"]  # which needs an interpreter that the user may run in a namespace
    home = shared / str(user)
    env = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(home),
        "TMPDIR": str(home),
        "OFFLINE_ROOT": str(shared / "store"),
        "PIP_NO_INDEX": "1",
        "PIP_CACHE_DIR": str(home / "cache"),
        "UV_CACHE_DIR": str(home / "cache-of-uv"),
        "PIP_FIND_LINKS": str(shared / "wheels"),
        "PYTHONPATH": str(REPO),
    }
    return start(as_user(user, argv), cwd=home, env=env)


def finished(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    report: dict[str, object] = json.loads(out)
    return report


def test_two_users_of_a_group_share_a_store(shared: Path) -> None:
    first, second = USERS
    store = Store(shared / "store")
    mine = finished(build(shared, first))
    theirs = finished(build(shared, second))
    assert theirs["layers_reused"] == mine["layers_built"] - 1  # type: ignore[operator]
    found = modes(store.root)
    assert found == {("folder", "0o2770"), ("file", "0o660")}
    assert {path.lstat().st_gid for path in store.root.rglob("*")} == {GROUP}
    for user in USERS:
        (shared / str(user) / "train.py").write_text("print('changed')\n")
    running = [build(shared, user) for user in USERS]
    assert len({str(finished(process)["id"]) for process in running}) == 2
    owners = {path.lstat().st_uid for path in store.bundles.iterdir()}
    assert owners == set(USERS)
    # What a killed build of one left, the other one's next build takes away.
    left = left_behind(store, "new")
    os.chown(left, first, -1)
    (left / "half").write_text("x")
    os.chown(left / "half", first, -1)
    finished(build(shared, second))
    assert not left.exists()


def test_without_the_group_the_store_stays_closed(shared: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom stager.core.errors import StagerError\n"
        "from stager.core.store import Store\n"
        "try:\n    with Store(Path(sys.argv[1])).lock(): pass\n"
        "except StagerError as exc: sys.exit(f'{exc.message} {exc.hint}')\n"
    )
    argv = as_user(USERS[0], [sys.executable, "-c", code, str(shared / "store")], group=1)
    done = run(argv, cwd=REPO)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
    assert "2770" in done.stderr
