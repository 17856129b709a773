"""The node root: ours and closed to others, or refused."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bundle.node.node_root import secure_root
from bundle.protocol.problem import NodeError
from tests.support.namespaces import REPO
from tests.support.needs import needs


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_makes_a_node_root_of_our_own(tmp_path: Path) -> None:
    before = os.umask(0o277)
    try:
        root = secure_root(str(tmp_path))
    finally:
        os.umask(before)
    assert root == str(tmp_path / f"stager-{os.geteuid()}")
    assert sorted(os.listdir(root)) == [".gitignore", "envs", "incoming", "jobs", "locks"]
    assert {mode(root), *(mode(entry) for entry in Path(root).iterdir() if entry.is_dir())} == {
        0o700
    }
    assert secure_root(str(tmp_path)) == root


def test_closes_a_node_root_that_others_could_enter(tmp_path: Path) -> None:
    root = Path(secure_root(str(tmp_path)))
    (root / "envs").chmod(0o777)
    root.chmod(0o755)
    secure_root(str(tmp_path))
    assert (mode(root), mode(root / "envs")) == (0o700, 0o700)


def test_the_base_may_be_a_link_the_node_root_may_not(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    root = secure_root(str(tmp_path / "link"))
    assert root == str(tmp_path / "real" / f"stager-{os.geteuid()}")


@pytest.mark.parametrize("inside", ["", "envs"])
def test_refuses_a_symbolic_link(tmp_path: Path, inside: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    place = tmp_path / f"stager-{os.geteuid()}" / inside
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(elsewhere)
    with pytest.raises(NodeError, match="symbolic link") as caught:
        secure_root(str(tmp_path))
    assert caught.value.problem.where == str(place)
    assert not list(elsewhere.iterdir())
    assert mode(elsewhere) == 0o755


def test_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / f"stager-{os.geteuid()}").touch()
    with pytest.raises(NodeError, match="not a directory"):
        secure_root(str(tmp_path))


@pytest.mark.parametrize("inside", ["", "envs"])
def test_refuses_what_belongs_to_another_user(tmp_path: Path, inside: str) -> None:
    needs("root")
    root = Path(secure_root(str(tmp_path)))
    os.chown(root / inside, 12345, -1)
    with pytest.raises(NodeError, match="belongs to user 12345, not to user 0"):
        secure_root(str(tmp_path))


def test_refuses_a_base_in_which_anyone_can_replace_it(tmp_path: Path) -> None:
    base = tmp_path / "open"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(NodeError, match="mode 0777, no sticky bit"):
        secure_root(str(base))
    assert not list(base.iterdir())
    base.chmod(0o1777)
    assert Path(secure_root(str(base))).is_dir()


def test_refuses_a_base_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="No such file"):
        secure_root(str(tmp_path / "absent"))


def test_refuses_a_base_that_cannot_be_written() -> None:
    with pytest.raises(NodeError, match="stager-"):
        secure_root("/proc/self")


def test_refuses_a_base_that_this_user_may_not_write() -> None:
    needs("root")
    with tempfile.TemporaryDirectory() as base:  # pytest's own is closed to other users
        os.chmod(base, 0o755)
        code = f"""
from bundle.node.node_root import choose_base
from bundle.protocol.problem import NodeError
from bundle.node.node_root import secure_root
os.setresuid(12345, 12345, 12345)
for function in (lambda: secure_root({base!r}), lambda: choose_base({base!r}, {{}})):
    try:
        function()
    except NodeError as exc:
        print(exc)
"""
        done = subprocess.run(
            [sys.executable, "-c", f"import os, sys; sys.path.insert(0, {str(REPO)!r})\n{code}"],
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
    said = done.stdout.splitlines()
    assert said[0].startswith(
        f"{base}/stager-12345: cannot be used as node root; Permission denied"
    )
    assert f"{base}: this user may not write to it" in said[1]


def test_many_at_once_agree(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
    code += "from bundle.node.node_root import secure_root\n"
    code += f"print(secure_root({str(tmp_path)!r}))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    roots = {process.communicate(timeout=300)[0].strip() for process in started}
    assert roots == {str(tmp_path / f"stager-{os.geteuid()}")}
