"""The values between the stages, above all the target, against packaging and pip themselves."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from packaging import tags
from packaging.markers import Marker, default_environment

from stager.core.errors import ConfigError
from stager.core.values import Target

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
COMMON = Target(python="3.11", platform="manylinux_2_28_x86_64")


def test_the_hosts_tags_are_packagings_own_in_the_same_order():
    """But for ``linux_*``, which comes after ``manylinux_*``, as with uv."""
    theirs = [tag for tag in tags.sys_tags() if tag.interpreter.startswith(("cp", "py"))]
    ours = list(Target.from_host().tags())
    assert set(ours) == set(theirs)
    named = [tag for tag in ours if not tag.platform.startswith("linux_")]
    assert named == [tag for tag in theirs if not tag.platform.startswith("linux_")]


def test_the_hosts_markers_are_packagings_own():
    theirs = default_environment()
    ours = Target.from_host().environment()
    assert set(theirs) == set(ours)
    # What a target cannot know: the kernel of a machine that is not here yet.
    for key in set(theirs) - {"platform_release", "platform_version", "implementation_version"}:
        assert ours[key] == theirs[key], key


def test_another_python_has_its_own_tags_and_markers():
    target = Target(python="3.9", platform="manylinux_2_17_aarch64")
    found = {str(tag) for tag in target.tags()}
    assert "cp39-cp39-manylinux2014_aarch64" in found
    assert "cp38-abi3-manylinux_2_17_aarch64" in found
    assert "py3-none-any" in found
    assert not any("x86_64" in tag or "2_18" in tag or "cp310" in tag for tag in found)
    environment = dict(target.environment())
    assert Marker("python_version < '3.10' and platform_machine == 'aarch64'").evaluate(environment)
    assert Marker("python_full_version < '3.10'").evaluate(environment)  # not as strings
    assert target.is_host_python == (HERE == "3.9")


def test_musl_has_no_manylinux_names():
    target = Target(python="3.12", platform="musllinux_1_2_x86_64")
    assert target.platforms() == [
        "musllinux_1_2_x86_64",
        "musllinux_1_1_x86_64",
        "musllinux_1_0_x86_64",
        "linux_x86_64",  # last, as uv has it: the tag names no C library that the nodes must have
    ]
    assert target.libc == ("musl", (1, 2))


WRONG = [
    *[("python", text) for text in ("", "3", "3.11.2", "cp311", "2.7", "3.x", "3.11\n", " 3.11")],
    *[("platform", text) for text in ("", "linux", "linux_x86_64", "macosx_14_0_arm64")],
]


@pytest.mark.parametrize(("key", "text"), WRONG)
def test_a_value_that_is_none_names_its_key(key, text):
    with pytest.raises(ConfigError, match=rf"environment\.{key}") as caught:
        replace(COMMON, **{key: text})
    assert repr(text) in caught.value.message
    assert getattr(COMMON, key) in caught.value.hint
