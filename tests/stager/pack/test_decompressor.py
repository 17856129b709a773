"""The pinned zstd decompressor: one true wheel for every target that Python has no zstd for."""

from __future__ import annotations

import pytest
from packaging.utils import parse_wheel_filename

from stager.core.errors import ResolveError
from stager.core.store import sha256_of
from stager.core.values import Target
from stager.pack.decompressor import decompressor_lock
from tests.support.building import HOST

PLATFORMS = [
    f"{libc}_{machine}"
    for libc in ("manylinux_2_28", "musllinux_1_2")
    for machine in ("x86_64", "aarch64")
]


@pytest.mark.parametrize("python", ["3.9", "3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_there_is_one_wheel_for_each_target(python, platform):
    target = Target(python=python, platform=platform)
    lock = decompressor_lock(target)
    assert lock is not None
    (file,) = lock.files
    name, version, _, tags = parse_wheel_filename(file.filename)
    assert (name, version) == (file.name, file.version)
    assert file.name == "zstandard"
    assert not tags.isdisjoint(target.tags())
    assert {tag.interpreter for tag in tags} == {target.python_tag}


def test_all_targets_have_wheels_of_their_own():
    locks = [
        decompressor_lock(Target(python=f"3.{minor}", platform=platform))
        for minor in range(9, 14)
        for platform in PLATFORMS
    ]
    assert len({lock.files[0].sha256 for lock in locks if lock}) == len(locks)


@pytest.mark.parametrize("python", ["3.14", "3.15", "3.20"])
def test_a_python_with_zstd_of_its_own_needs_none(python):
    assert decompressor_lock(Target(python=python, platform=HOST.platform)) is None


def test_another_python_unpacks_a_bundle_that_brings_one_with_zstd():
    lock = decompressor_lock(Target(python="3.14", platform=HOST.platform), bundled_python=True)
    assert lock is not None
    assert "-cp313-" in lock.files[0].filename
    same = Target(python="3.12", platform=HOST.platform)
    assert decompressor_lock(same, bundled_python=True) == decompressor_lock(same)


@pytest.mark.parametrize(
    ("python", "platform"),
    [("3.8", "manylinux_2_28_x86_64"), ("3.11", "manylinux_2_28_mips64"),
     ("3.11", "manylinux_2_5_x86_64")],
)  # fmt: skip
def test_a_target_without_a_wheel_is_named(python, platform):
    with pytest.raises(ResolveError, match=rf"Python {python} on {platform}") as caught:
        decompressor_lock(Target(python=python, platform=platform))
    assert "3.9" in caught.value.hint


def test_the_digest_is_that_of_the_published_file(zstandard_wheel):
    lock = decompressor_lock(HOST)
    assert lock is not None
    assert lock.files[0].filename == zstandard_wheel.name
    assert lock.files[0].sha256 == sha256_of(zstandard_wheel)
