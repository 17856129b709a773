"""The build of PyTorch that ``auto`` stands for: by the driver, and then by the lock."""

from __future__ import annotations

import pytest

from stager.core.errors import ResolveError
from stager.core.store import Store
from stager.lock.lock import ResolveOptions, make_lock
from stager.lock.pylock import read_lock
from stager.lock.resolver import KnownDriver, backend_for
from tests.support.wheelhouse import make_wheel


@pytest.mark.parametrize(
    ("driver", "backend"),
    [
        ("595.45.04", "cu130"),
        ("580.65.06", "cu130"),
        ("575.51.03", "cu128"),
        ("570.26", "cu128"),
        ("560.28.03", "cu126"),
        ("525.60.13", "cu126"),
        ("520.61.05", "cu118"),
        ("450.80.02", "cu118"),
        ("440.33", "cpu"),
        ("", "cpu"),
    ],
)
def test_the_build_for_a_driver(driver, backend):
    assert backend_for(driver) == backend


class Locking:
    """Locks by a driver, and remembers what was said."""

    def __init__(self, spec, path, store):
        self.spec, self.path, self.store = spec, path, store
        self.notes: list[str] = []

    def by(self, version, where="allocation 7"):
        options = ResolveOptions(
            resolver="uv",
            driver=lambda: KnownDriver(version=version, where=where),
            note=self.notes.append,
        )
        made = make_lock(
            self.spec,
            path=self.path,
            store=self.store,
            options=options,
            reachable=lambda _: False,
        )
        assert read_lock(self.path, self.spec.target) == made
        assert made.is_current(self.spec)
        return made


@pytest.fixture
def locking(root, tmp_path, ask, index_env, wheelhouse):
    for local in ("cpu", "cu126", "cu130"):
        make_wheel(wheelhouse, "torch", f"2.13.0+{local}")
    spec = ask("torch==2.13.0+cu126", torch_backend="auto")
    return Locking(spec, root / "pylock.toml", Store(tmp_path / "offline"))


def test_the_lock_keeps_the_choice(locking):
    made = locking.by("550.54.14")
    assert made.torch_backend == "cu126"
    assert locking.notes == [
        'torch-backend "auto" is cu126: the driver of allocation 7 is 550.54.14; pylock.toml keeps '
        "it; set environment.torch-backend to have another"
    ]
    assert locking.by("", "this machine").torch_backend == "cu126"
    assert len(locking.notes) == 1
    locking.path.write_text(locking.path.read_text().replace('torch-backend = "cu126"\n', ""))
    with pytest.raises(ResolveError, match=r"only torch .* is available|CUDA packages"):
        locking.by("", "this machine")
    assert "is cpu: no NVIDIA driver on this machine" in locking.notes[1]


def test_a_release_for_a_newer_cuda_than_the_drivers_run_is_refused(locking, ask, wheelhouse):
    """As an index has it whose newest torch is older than another index's."""
    locking.spec = ask("accelerated", torch_backend="auto")
    make_wheel(wheelhouse, "nvidia-cuda-runtime", "13.0.96")
    make_wheel(wheelhouse, "accelerated", requires=["nvidia-cuda-runtime"])
    with pytest.raises(ResolveError, match="is cu126 for the drivers, but nvidia-cuda-runtime 13"):
        locking.by("550.54.14")
    assert locking.by("580.65.06").torch_backend == "cu130"
