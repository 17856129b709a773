"""The choice of the directory for the node root."""

import os
from pathlib import Path

import pytest

from bundle.node import node_root
from bundle.protocol.problem import NodeError
from tests.support.needs import needs


def test_the_variable_wins_over_the_setting(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    env = {"STAGER_NODE_ROOT": str(tmp_path / "a")}
    assert node_root.choose_base(str(tmp_path / "b"), env) == str(tmp_path / "a")
    assert node_root.choose_base(str(tmp_path / "b"), {}) == str(tmp_path / "b")
    assert node_root.choose_base("auto", env) == str(tmp_path / "a")


def test_the_setting_may_use_the_node_s_variables(tmp_path: Path) -> None:
    assert node_root.choose_base("$SCRATCH", {"SCRATCH": str(tmp_path)}) == str(tmp_path)
    odd = tmp_path / "5$"
    odd.mkdir()
    assert node_root.choose_base(str(odd), {}) == str(odd)
    with pytest.raises(NodeError, match=r"\$SCRATCH is not set on this node"):
        node_root.choose_base("$SCRATCH/x", {})


def test_auto_takes_the_first_that_fits(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    env = {"SLURM_TMPDIR": str(one), "TMPDIR": str(two)}
    assert node_root.choose_base("auto", env) == str(one)
    one.rmdir()
    assert node_root.choose_base("auto", env) == str(two)
    assert node_root.choose_base("auto", {}) == "/tmp"


@pytest.mark.parametrize("planted", ["link", "pipe", "directory"])
def test_a_place_that_another_user_took_is_passed_over(tmp_path: Path, planted: str) -> None:
    """In a public directory anybody may be there first; they keep nobody from the next one."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    place = one / node_root.node_root_name()
    if planted == "link":
        place.symlink_to(two)
    elif planted == "pipe":
        os.mkfifo(place)
    else:
        needs("root")
        place.mkdir(mode=0o777)
        os.chown(place, 12345, -1)
    env = {"SLURM_TMPDIR": str(one), "TMPDIR": str(two)}
    assert node_root.choose_base("auto", env) == str(two)
    # One that the user has named is not exchanged for another; it is refused when it is opened.
    assert node_root.choose_base(str(one), env) == str(one)


def test_a_refusal_lists_all_candidates_and_how_to_move(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"SLURM_TMPDIR": str(tmp_path / "file"), "TMPDIR": "relative"}
    with pytest.raises(NodeError) as caught:
        node_root.choose_base("auto", env, (10**18, 10**15))
    text = str(caught.value)
    assert f"$SLURM_TMPDIR = {tmp_path}/file: it is not a directory" in text
    assert "$TMPDIR = relative: it is not an absolute path" in text
    assert "/tmp: needs 1000000000.0 GB, " in text
    memory = 'it takes memory, which node-root = "auto-memory" allows'
    assert f"/dev/shm: {memory}" in text
    with pytest.raises(NodeError) as caught:
        node_root.choose_base("auto-memory", env, (10**18, 10**15))
    assert "/dev/shm: needs" in str(caught.value)
    assert f"needs {10**15} inodes, " in text
    assert "[cluster] node-root" in text
    assert "$STAGER_NODE_ROOT" in text


def test_a_named_directory_is_not_replaced_by_another(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=f"it does not exist .`mkdir -p {tmp_path}/absent` makes"):
        node_root.choose_base(str(tmp_path / "absent"), {"TMPDIR": str(tmp_path)})


def test_an_environment_that_is_there_takes_no_room(tmp_path: Path) -> None:
    much = (10**18, 10)
    with pytest.raises(NodeError, match="free"):
        node_root.base_for(str(tmp_path), "0a", much, {})
    root = tmp_path / node_root.node_root_name()
    Path(node_root.env_path(str(root), "0a")).mkdir(parents=True)
    assert node_root.base_for(str(tmp_path), "0a", much, {}) == str(tmp_path)
