"""What every test starts from: a home, a store and node roots of its own, and a small index."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from packaging.version import Version

from tests.support import requirements
from tests.support.building import project, supplies, zstandard_wheel  # noqa: F401 - fixtures
from tests.support.hub_server import PATIENT
from tests.support.needs import needs
from tests.support.nesting import nested  # noqa: F401 - a fixture
from tests.support.requirements import DATA
from tests.support.signing import alice, mallory  # noqa: F401 - fixtures
from tests.support.sources import build_native_wheel, make_sdist, repack_installed
from tests.support.torch_project import torch_project  # noqa: F401 - a fixture
from tests.support.wheelhouse import standard_set

TESTS = Path(__file__).resolve().parent
REPO = TESTS.parent

# A test must not depend on what the shell that started it happened to export.
FOREIGN = """
    MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK OMP_NUM_THREADS
    GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME ACCELERATE_USE_CPU SALLOC_OPTS SOURCE_DATE_EPOCH
    VIRTUAL_ENV NO_COLOR FORCE_COLOR PYTHONPATH PYTHONHOME PYTHONNOUSERSITE PYTHONDONTWRITEBYTECODE
    PYTHONUNBUFFERED XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME XDG_RUNTIME_DIR
    HF_HOME HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE
"""
FOREIGN_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "STAGER_", "TORCHELASTIC_")


def pytest_configure() -> None:
    """Let the tests' programs be ended by a hangup, which ``nohup`` ignores, and wait for a hub."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    os.environ.update(PATIENT)  # read when the library is imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``needs`` before anything is made for it."""
    for mark in item.iter_markers("needs"):
        needs(*mark.args)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Tell last of all how many tests were skipped for what, and what would bring them back."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    skipped = Counter(requirements.title_of(str(report.longrepr[2])) for report in reports)
    requirements.note(skipped)
    if skipped:
        reporter.write_line(requirements.summary(skipped))
    return result


@pytest.fixture(scope="session")
def pip_settings() -> Mapping[str, str]:
    """The caller's pip configuration as variables: it is lost once HOME is another directory."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        scope, _, option = key.rpartition(".")
        if scope not in {"global", ":env:"}:
            continue  # set for one of pip's commands; a variable would set it for all
        # Lines for variables that are already set come last, so they win here as they do in pip.
        settings[f"PIP_{option.upper().replace('-', '_')}"] = value.strip("'").replace("\\n", " ")
    return settings


@pytest.fixture(scope="session", autouse=True)
def no_sockets_left() -> Iterator[None]:
    """Remove what builds that tests kill leave behind: multiprocessing's directory for a socket."""
    place = Path(tempfile.gettempdir())
    before = set(place.glob("pymp-*"))
    yield
    left = set(place.glob("pymp-*")) - before
    if _list_closed(left):
        time.sleep(5)  # somebody beside these tests may be about to make a socket
    for folder in _list_closed(left):
        shutil.rmtree(folder, ignore_errors=True)


def _list_closed(folders: Iterable[Path]) -> list[Path]:
    """Those without an open socket, which somebody alive would have."""
    alive = Path("/proc/net/unix").read_text()
    return [folder for folder in folders if folder.exists() and str(folder) not in alive]


@pytest.fixture(autouse=True)
def isolated(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    pip_settings: Mapping[str, str],
) -> Path:
    """Give the test a home, an offline root and a place for node roots; returns the home."""
    for name in list(os.environ):
        if name in FOREIGN.split() or name.startswith(FOREIGN_PREFIXES):
            monkeypatch.delenv(name)
    for name, value in pip_settings.items():
        monkeypatch.setenv(name, value)
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("PIP_CACHE_DIR", str(base / "pip-cache"))
    if "UV_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("UV_CACHE_DIR", str(base / "uv-cache"))
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OFFLINE_ROOT", str(tmp_path / "offline"))
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    monkeypatch.setenv("STAGER_NODE_ROOT", str(nodes))
    return home


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    """A folder with the standard set of wheels; see ``wheelhouse.standard_set``."""
    folder = tmp_path / "wheelhouse"
    standard_set(folder)
    return folder


@pytest.fixture
def index_env(monkeypatch: pytest.MonkeyPatch, wheelhouse: Path) -> dict[str, str]:
    """Variables, also set for this test, that make pip resolve from ``wheelhouse`` and no other."""
    env = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheelhouse),
        "PIP_INDEX_URL": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_CONFIG_FILE": os.devnull,
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


@pytest.fixture(scope="session")
def native_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a C extension, ``native-ext`` 1.0, compiled here once."""
    base = tmp_path_factory.mktemp("native")
    return build_native_wheel(base, base / "source")


@pytest.fixture(scope="session")
def build_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels of setuptools, and of what it needs, to build sdists from."""
    folder = tmp_path_factory.mktemp("build-wheels")
    repack_installed(folder, "setuptools")
    if Version(importlib.metadata.version("setuptools")) < Version("70.1"):
        repack_installed(folder, "wheel")  # what builds the wheel, before setuptools did itself
        repack_installed(folder, "packaging")
    return folder


@pytest.fixture
def sdist(wheelhouse: Path, build_wheels: Path) -> Path:
    """An sdist, ``from-source`` 1.0, in ``wheelhouse``, which then has setuptools as well."""
    for wheel in build_wheels.iterdir():
        shutil.copy2(wheel, wheelhouse)
    return make_sdist(wheelhouse, "from-source")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The real test data beside the repository."""
    needs("data")
    return DATA
