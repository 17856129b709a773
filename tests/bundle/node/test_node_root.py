"""The node root: ours and closed to others, or refused."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bundle.node import node_root
from bundle.node.node_root import make_secure_root
from bundle.protocol.problem import NodeError
from tests.support.namespaces import REPO
from tests.support.needs import needs


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_makes_a_node_root_of_our_own_and_closes_it_again(tmp_path: Path) -> None:
    before = os.umask(0o277)
    try:
        root = Path(make_secure_root(str(tmp_path)))
    finally:
        os.umask(before)
    assert root == tmp_path / f"stager-{os.geteuid()}"
    assert sorted(os.listdir(root)) == [".gitignore", "envs", "incoming", "jobs", "locks"]
    folders = [root, *(entry for entry in root.iterdir() if entry.is_dir())]
    assert {mode(folder) for folder in folders} == {0o700}
    (root / "envs").chmod(0o777)
    root.chmod(0o755)
    assert make_secure_root(str(tmp_path)) == str(root)
    assert (mode(root), mode(root / "envs")) == (0o700, 0o700)
    (tmp_path / "link").symlink_to(".")  # the base may be one, the node root may not
    assert make_secure_root(str(tmp_path / "link")) == str(root)


@pytest.mark.parametrize("inside", ["", "envs"])
def test_refuses_a_symbolic_link(tmp_path: Path, inside: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    place = tmp_path / f"stager-{os.geteuid()}" / inside
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(elsewhere)
    with pytest.raises(NodeError, match="symbolic link") as caught:
        make_secure_root(str(tmp_path))
    assert caught.value.problem.where == str(place)
    assert not list(elsewhere.iterdir())
    assert mode(elsewhere) == 0o755


@pytest.mark.parametrize("base", ["absent", "/proc/self"])
def test_refuses_a_base_that_cannot_hold_it(tmp_path: Path, base: str) -> None:
    with pytest.raises(NodeError, match=r"No such file|stager-"):
        make_secure_root(str(tmp_path / base))
    (tmp_path / f"stager-{os.geteuid()}").touch()
    with pytest.raises(NodeError, match="not a directory"):
        make_secure_root(str(tmp_path))


@pytest.mark.parametrize("inside", ["", "envs"])
def test_refuses_what_belongs_to_another_user(tmp_path: Path, inside: str) -> None:
    needs("root")
    root = Path(make_secure_root(str(tmp_path)))
    os.chown(root / inside, 12345, -1)
    with pytest.raises(NodeError, match="belongs to user 12345, not to user 0"):
        make_secure_root(str(tmp_path))


def test_refuses_a_base_in_which_anyone_can_replace_it(tmp_path: Path) -> None:
    base = tmp_path / "open"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(NodeError, match="mode 0777, no sticky bit"):
        make_secure_root(str(base))
    assert not list(base.iterdir())
    base.chmod(0o1777)
    assert Path(make_secure_root(str(base))).is_dir()


def test_refuses_a_base_that_this_user_may_not_write() -> None:
    needs("root")
    with tempfile.TemporaryDirectory() as base:  # pytest's own is closed to other users
        os.chmod(base, 0o755)
        os.setresuid(12345, 12345, 0)
        try:
            with pytest.raises(NodeError) as making:
                make_secure_root(base)
            with pytest.raises(NodeError, match=f"{base}: this user may not write to it"):
                node_root.choose_base(base, {})
        finally:
            os.setresuid(0, 0, 0)
    unusable = f"{base}/stager-12345: cannot be used as node root; Permission denied"
    assert str(making.value).startswith(unusable)


def test_many_at_once_agree(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
    code += "from bundle.node.node_root import make_secure_root\n"
    code += f"print(make_secure_root({str(tmp_path)!r}))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    roots = {process.communicate(timeout=300)[0].strip() for process in started}
    assert roots == {str(tmp_path / f"stager-{os.geteuid()}")}


# --- The choice of the directory for the node root -----------------------------------------------


def test_the_variable_wins_over_the_setting_which_may_use_the_nodes_variables(
    tmp_path: Path,
) -> None:
    for name in ("a", "b", "5$"):
        (tmp_path / name).mkdir()
    env = {"STAGER_NODE_ROOT": str(tmp_path / "a")}
    assert node_root.choose_base(str(tmp_path / "b"), env) == str(tmp_path / "a")
    assert node_root.choose_base(str(tmp_path / "b"), {}) == str(tmp_path / "b")
    assert node_root.choose_base("auto", env) == str(tmp_path / "a")
    assert node_root.choose_base("$SCRATCH", {"SCRATCH": str(tmp_path)}) == str(tmp_path)
    assert node_root.choose_base(str(tmp_path / "5$"), {}) == str(tmp_path / "5$")
    with pytest.raises(NodeError, match=r"\$SCRATCH is not set on this node"):
        node_root.choose_base("$SCRATCH/x", {})
    # A directory that was named is not replaced by another one.
    with pytest.raises(NodeError, match=f"it does not exist .`mkdir -p {tmp_path}/absent` makes"):
        node_root.choose_base(str(tmp_path / "absent"), {"TMPDIR": str(tmp_path)})


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


def test_an_environment_that_is_there_takes_no_room(tmp_path: Path) -> None:
    much = (10**18, 10)
    with pytest.raises(NodeError, match="free"):
        node_root.choose_base_for_bundle(str(tmp_path), "0a", much, {})
    root = tmp_path / node_root.node_root_name()
    Path(node_root.env_path(str(root), "0a")).mkdir(parents=True)
    assert node_root.choose_base_for_bundle(str(tmp_path), "0a", much, {}) == str(tmp_path)
