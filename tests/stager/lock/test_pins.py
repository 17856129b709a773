"""Pins that stay, upgrades, the cutoff, and what a lock changes."""

from __future__ import annotations

import pytest

from stager.core.errors import ResolveError
from stager.core.store import Store
from stager.core.values import Target
from stager.lock import resolver
from stager.lock.lock import ResolveOptions, make_lock
from stager.lock.pylock import compare_locks, find_earlier_lock, read_lock
from stager.lock.resolver import KnownDriver, choose_backend
from tests.support.index_server import Index, serve
from tests.support.wheelhouse import make_wheel

BOTH = pytest.mark.parametrize("resolver", ["uv", "pip-tools"])


@pytest.fixture
def relock(root, tmp_path, ask):
    """Lock these requirements over the lock of the call before."""

    def make(*requirements, **options):
        spec = ask(*requirements)
        path = root / "pylock.toml"
        earlier = find_earlier_lock(path, spec.target)
        made = make_lock(
            spec,
            path=path,
            store=Store(tmp_path / "offline"),
            options=ResolveOptions(**options),
        )
        return made, compare_locks(earlier, made)

    return make


def versions(lock):
    return {file.name: str(file.version) for file in lock.files}


@BOTH
@pytest.mark.usefixtures("index_env")
def test_pins_stay_until_they_are_upgraded(relock, wheelhouse, resolver):
    relock("alpha", "beta<2", resolver=resolver)
    added = make_wheel(wheelhouse, "tqdm")
    make_wheel(wheelhouse, "alpha", "1.5", requires=["beta>=1.1"])
    made, difference = relock("alpha", "beta", "tqdm", resolver=resolver)
    assert versions(made) == {"alpha": "1.0", "beta": "1.1", "tqdm": "1.0"}
    assert [(one.name, one.old, one.new) for one in difference.added] == [("tqdm", None, "1.0")]
    assert not difference.changed
    assert difference.bytes == added.stat().st_size

    made, difference = relock("alpha", "beta", resolver=resolver, upgrade_packages=("alpha",))
    assert versions(made) == {"alpha": "1.5", "beta": "1.1"}
    assert [(one.name, one.old, one.new) for one in difference.changed] == [("alpha", "1.0", "1.5")]
    assert [(one.name, one.old, one.new) for one in difference.removed] == [("tqdm", "1.0", None)]

    made, _ = relock("alpha", "beta", resolver=resolver, upgrade=True)
    assert versions(made) == {"alpha": "1.5", "beta": "2.0"}


@BOTH
@pytest.mark.usefixtures("index_env")
def test_a_pin_that_is_not_allowed_or_not_there_any_more_goes(relock, wheelhouse, resolver):
    make_wheel(wheelhouse, "gone", "1.0")
    relock("alpha", "beta<2", "gone", resolver=resolver)
    (wheelhouse / "gone-1.0-py3-none-any.whl").unlink()
    make_wheel(wheelhouse, "gone", "1.1")
    made, difference = relock("alpha", "beta>=2", "gone", resolver=resolver)
    assert versions(made) == {"alpha": "1.0", "beta": "2.0", "gone": "1.1"}
    assert [one.name for one in difference.changed] == ["beta", "gone"]


@BOTH
def test_files_newer_than_the_cutoff_do_not_count(relock, wheelhouse, monkeypatch, resolver):
    uploaded = dict.fromkeys((file.name for file in wheelhouse.iterdir()), "2024-01-01T00:00:00Z")
    uploaded["beta-2.0-py3-none-any.whl"] = "2025-06-01T12:00:00Z"
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with serve(Index(folder=wheelhouse, uploaded=uploaded)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        made, _ = relock("beta", resolver=resolver, exclude_newer="2025-05-31")
        assert versions(made) == {"beta": "1.1"}
        made, _ = relock("beta", resolver=resolver, upgrade=True)  # the lock keeps the cutoff
        assert versions(made) == {"beta": "1.1"}
        assert made.exclude_newer == "2025-05-31"
        made, _ = relock("beta", resolver=resolver, upgrade=True, exclude_newer="none")
        assert versions(made) == {"beta": "2.0"}
        assert made.exclude_newer is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2025-01-31", "2025-02-01T00:00:00Z"),
        ("2025-01-31T12:00:00Z", "2025-01-31T12:00:00Z"),
        ("2025-01-31T12:00:00+02:00", "2025-01-31T10:00:00Z"),
        ("0999-01-31T12:00:00Z", "0999-01-31T12:00:00Z"),
    ],
)
def test_a_cutoff_means_the_same_everywhere(text, expected):
    assert resolver.to_timestamp(text) == expected
    assert resolver.check_cutoff(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("yesterday", "2025-13-01", "2025-01-31T12:00:00", "", "9999-12-31"),
        *("0001-01-01T00:00:00+05:00", "9999-12-31T23:00:00-05:00"),
    ],
)
def test_what_is_no_cutoff(text):
    with pytest.raises(ValueError, match=r".+"):
        resolver.check_cutoff(text)


def test_a_lock_is_made_again_only_for_another_cutoff():
    assert not ResolveOptions().requires_new_lock("2025-01-31")
    assert not ResolveOptions(exclude_newer="2025-01-31").requires_new_lock("2025-01-31")
    assert not ResolveOptions(exclude_newer="none").requires_new_lock(None)
    assert ResolveOptions(exclude_newer="none").requires_new_lock("2025-01-31")
    assert ResolveOptions(exclude_newer="2025-01-31").requires_new_lock(None)
    assert ResolveOptions(upgrade_packages=("alpha",)).requires_new_lock(None)


@pytest.mark.usefixtures("index_env")
def test_a_damaged_lock_is_made_anew(relock, root):
    relock("alpha", exclude_newer=None)
    path = root / "pylock.toml"
    text = path.read_text()
    for value in ("none", "9999-12-31", "soon"):
        line = f'exclude-newer = "{value}"\nspec-digest ='
        path.write_text(text.replace("spec-digest =", line))
        with pytest.raises(ResolveError, match="exclude-newer"):
            read_lock(path, Target.from_host())
    made, difference = relock("alpha")
    assert versions(made) == {"alpha": "1.0", "beta": "2.0"}
    assert len(difference.added) == 2


# --- The build of PyTorch that ``auto`` stands for: by the driver, and then by the lock


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
    assert choose_backend(driver) == backend


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
