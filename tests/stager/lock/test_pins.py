"""Pins that stay, upgrades, the cutoff, and what a lock changes."""

from __future__ import annotations

import pytest

from stager.core.errors import ResolveError
from stager.core.values import Target
from stager.lock import resolver
from stager.lock.lock import ResolveOptions
from stager.lock.pylock import compare_locks, find_earlier_lock, read_lock
from stager.lock.resolver import KnownDriver, choose_backend
from tests.support.index_server import Index, serve
from tests.support.locks import BOTH, UV_FIRST, versions
from tests.support.wheelhouse import make_wheel


@pytest.fixture
def relock(root, ask, lock):
    """Lock these requirements over the lock of the call before."""

    def make(*requirements, **options):
        earlier = find_earlier_lock(root / "pylock.toml", ask(*requirements).target)
        made = lock(*requirements, **options)
        return made, compare_locks(earlier, made)

    return make


@BOTH
@pytest.mark.usefixtures("index_env")
def test_pins_stay_until_they_are_upgraded(relock, wheelhouse):
    relock("alpha", "beta<2")
    added = make_wheel(wheelhouse, "tqdm")
    make_wheel(wheelhouse, "alpha", "1.5", requires=["beta>=1.1"])
    made, difference = relock("alpha", "beta", "tqdm")
    assert versions(made) == {"alpha": "1.0", "beta": "1.1", "tqdm": "1.0"}
    assert [(one.name, one.old, one.new) for one in difference.added] == [("tqdm", None, "1.0")]
    assert not difference.changed
    assert difference.bytes == added.stat().st_size

    made, difference = relock("alpha", "beta", upgrade_packages=("alpha",))
    assert versions(made) == {"alpha": "1.5", "beta": "1.1"}
    assert [(one.name, one.old, one.new) for one in difference.changed] == [("alpha", "1.0", "1.5")]
    assert [(one.name, one.old, one.new) for one in difference.removed] == [("tqdm", "1.0", None)]

    made, _ = relock("alpha", "beta", upgrade=True)
    assert versions(made) == {"alpha": "1.5", "beta": "2.0"}


@UV_FIRST
@pytest.mark.usefixtures("index_env")
def test_a_pin_that_is_not_allowed_or_not_there_any_more_goes(relock, wheelhouse):
    make_wheel(wheelhouse, "gone", "1.0")
    relock("alpha", "beta<2", "gone")
    (wheelhouse / "gone-1.0-py3-none-any.whl").unlink()
    make_wheel(wheelhouse, "gone", "1.1")
    made, difference = relock("alpha", "beta>=2", "gone")
    assert versions(made) == {"alpha": "1.0", "beta": "2.0", "gone": "1.1"}
    assert [one.name for one in difference.changed] == ["beta", "gone"]


@BOTH
def test_files_newer_than_the_cutoff_do_not_count(relock, wheelhouse, only_index):
    uploaded = dict.fromkeys((file.name for file in wheelhouse.iterdir()), "2024-01-01T00:00:00Z")
    uploaded["beta-2.0-py3-none-any.whl"] = "2025-06-01T12:00:00Z"
    with serve(Index(folder=wheelhouse, uploaded=uploaded)) as index:
        only_index(index.url)
        for options, version, kept in (
            ({"exclude_newer": "2025-05-31"}, "1.1", "2025-05-31"),
            ({"upgrade": True}, "1.1", "2025-05-31"),  # the lock keeps the cutoff
            ({"upgrade": True, "exclude_newer": "none"}, "2.0", None),
        ):
            made, _ = relock("beta", **options)
            assert (versions(made), made.exclude_newer) == ({"beta": version}, kept)


def test_a_cutoff_means_the_same_everywhere():
    for text, expected in (
        ("2025-01-31", "2025-02-01T00:00:00Z"),
        ("2025-01-31T12:00:00Z", "2025-01-31T12:00:00Z"),
        ("2025-01-31T12:00:00+02:00", "2025-01-31T10:00:00Z"),
        ("0999-01-31T12:00:00Z", "0999-01-31T12:00:00Z"),
    ):
        assert resolver.to_timestamp(text) == expected
        assert resolver.check_cutoff(text) == text
    nonsense = ("yesterday", "2025-13-01", "2025-01-31T12:00:00", "", "9999-12-31")
    for text in (*nonsense, "0001-01-01T00:00:00+05:00", "9999-12-31T23:00:00-05:00"):
        with pytest.raises(ValueError, match=r".+"):
            resolver.check_cutoff(text)


def test_a_lock_is_made_again_only_for_another_cutoff():
    for options, cutoff, new in (
        ({}, "2025-01-31", False),
        ({"exclude_newer": "2025-01-31"}, "2025-01-31", False),
        ({"exclude_newer": "none"}, None, False),
        ({"exclude_newer": "none"}, "2025-01-31", True),
        ({"exclude_newer": "2025-01-31"}, None, True),
        ({"upgrade_packages": ("alpha",)}, None, True),
    ):
        assert ResolveOptions(**options).requires_new_lock(cutoff) is new


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


def test_the_build_for_a_driver():
    for backend, *drivers in (
        ("cu130", "595.45.04", "580.65.06"),
        ("cu128", "575.51.03", "570.26"),
        ("cu126", "560.28.03", "525.60.13"),
        ("cu118", "520.61.05", "450.80.02"),
        ("cpu", "440.33", ""),
    ):
        assert [choose_backend(driver) for driver in drivers] == [backend, backend]


@pytest.fixture
def locking(lock, index_env, wheelhouse):
    """Locks by a driver, and the notes of that."""
    notes = []
    for local in ("cpu", "cu126", "cu130"):
        make_wheel(wheelhouse, "torch", f"2.13.0+{local}")

    def lock_by(version, where="allocation 7", asked="torch==2.13.0+cu126"):
        known = KnownDriver(version=version, where=where)
        settings = {"driver": lambda: known, "note": notes.append}
        return lock(asked, torch_backend="auto", **settings)

    return lock_by, notes


def test_the_lock_keeps_the_choice(locking):
    lock_by, notes = locking
    made = lock_by("550.54.14")
    assert made.torch_backend == "cu126"
    assert notes == [
        'torch-backend "auto" is cu126: the driver of allocation 7 is 550.54.14; pylock.toml keeps '
        "it; set environment.torch-backend to have another"
    ]
    assert lock_by("", "this machine").torch_backend == "cu126"
    assert len(notes) == 1
    made.path.write_text(made.path.read_text().replace('torch-backend = "cu126"\n', ""))
    with pytest.raises(ResolveError, match=r"only torch .* is available|CUDA packages"):
        lock_by("", "this machine")
    assert "is cpu: no NVIDIA driver on this machine" in notes[1]


def test_a_release_for_a_newer_cuda_than_the_drivers_run_is_refused(locking, wheelhouse):
    """As an index has it whose newest torch is older than another index's."""
    lock_by, _ = locking
    make_wheel(wheelhouse, "nvidia-cuda-runtime", "13.0.96")
    make_wheel(wheelhouse, "accelerated", requires=["nvidia-cuda-runtime"])
    with pytest.raises(ResolveError, match="is cu126 for the drivers, but nvidia-cuda-runtime 13"):
        lock_by("550.54.14", asked="accelerated")
    assert lock_by("580.65.06", asked="accelerated").torch_backend == "cu130"
