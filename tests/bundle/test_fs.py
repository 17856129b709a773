"""File systems: recorded mount tables, the choice of a directory, and the node root made in it."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from namespaces import REPO, needs_root

from bundle import fs
from bundle.problem import NodeError

# From compute nodes, shortened: blanks as \040, a stack of two on /scratch, one hidden under it.
TABLE = r"""
21 27 0:20 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
30 27 0:30 / /tmp rw,nosuid,nodev shared:3 - tmpfs tmpfs rw,size=100k,inode64
31 27 0:31 / /tmp/my\040disk rw,noexec master:4 propagate_from:2 - xfs /dev/sdb rw
40 30 0:40 / /tmp/a\134b rw - ext4 /dev/sdc rw
50 27 0:50 / /scratch/old rw - ext4 /dev/sdd rw
51 27 0:51 / /scratch rw - xfs /dev/sde rw
52 51 0:52 / /scratch rw - lustre 10.0.0.1@o2ib:/lfs rw,flock
60 27 0:60 / /home rw,noatime - nfs4 filer:/home rw,vers=4.2
61 27 0:61 / /ro ro - ext4 /dev/sdf rw
62 27 0:62 / /super rw - squashfs /dev/loop0 ro
a line that is not a mount
"""

SHARED = """nfs nfs4 lustre gpfs beegfs ceph cifs smb3 9p afs pvfs2 wekafs panfs fuse.sshfs
    fuse.juicefs fuse.glusterfs fuse.ceph-fuse fuse.s3fs"""
LOCAL = """ext4 xfs btrfs zfs tmpfs overlay f2fs fuseblk fuse fuse.squashfuse
    fuse.fuse-overlayfs"""


def point_of(path: str) -> tuple[str, str]:
    mount = fs.mount_for(path, fs.parse_mounts(TABLE))
    assert mount is not None
    return mount.point, mount.fstype


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", ("/", "ext4")),
        ("/var/tmp", ("/", "ext4")),
        ("/tmp", ("/tmp", "tmpfs")),
        ("/tmpfoo", ("/", "ext4")),
        ("/tmp/a\\b/c", ("/tmp/a\\b", "ext4")),
        ("/scratch", ("/scratch", "lustre")),
        ("/scratch/old/x", ("/scratch", "lustre")),  # the older mount below is hidden
        ("/home/u", ("/home", "nfs4")),
    ],
)
def test_finds_the_mount(path: str, expected: tuple[str, str]) -> None:
    assert point_of(path) == expected


def test_reads_escapes_and_both_kinds_of_options() -> None:
    mounts = {mount.point: mount for mount in fs.parse_mounts(TABLE)}
    assert len(mounts) == 10  # two on /scratch
    assert mounts["/tmp/my disk"].options >= {"rw", "noexec"}
    assert "ro" in mounts["/ro"].options
    assert "ro" in mounts["/super"].options


def test_without_a_root_the_longest_and_then_the_last_counts() -> None:
    mounts = [mount for mount in fs.parse_mounts(TABLE) if mount.point != "/"]
    found = fs.mount_for("/scratch/x", mounts)
    assert found is not None
    assert found.fstype == "lustre"
    assert fs.mount_for("/var", mounts) is None


@pytest.mark.parametrize(
    ("fstype", "shared"),
    [
        *[(name, True) for name in SHARED.split()],
        *[(name, False) for name in LOCAL.split()],
    ],
)
def test_shared_file_systems(fstype: str, shared: bool) -> None:
    assert fs.Mount(1, 0, "/", fstype, frozenset()).shared is shared


def test_mount_of_agrees_with_the_kernel() -> None:
    for path in ("/", "/proc", "/dev/shm", "/tmp", str(REPO)):
        said = subprocess.run(
            ["findmnt", "-nro", "TARGET,FSTYPE", "--target", os.path.realpath(path)],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        assert [fs.mount_of(path).point, fs.mount_of(path).fstype] == said[-2:]


def test_facts_of_a_real_directory(tmp_path: Path) -> None:
    facts = fs.facts_of(str(tmp_path))
    state = os.statvfs(tmp_path)
    assert abs(facts.free_bytes - state.f_bavail * state.f_frsize) < 1 << 30
    assert not facts.read_only
    with pytest.raises(NodeError, match="No such file"):
        fs.facts_of(str(tmp_path / "absent"))


# --- choosing ------------------------------------------------------------------------------------


def test_the_variable_wins_over_the_setting(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    env = {"STAGER_NODE_ROOT": str(tmp_path / "a")}
    assert fs.choose_base(str(tmp_path / "b"), 0, 0, env) == str(tmp_path / "a")
    assert fs.choose_base(str(tmp_path / "b"), 0, 0, {}) == str(tmp_path / "b")
    assert fs.choose_base("auto", 0, 0, env) == str(tmp_path / "a")


def test_the_setting_may_use_the_node_s_variables(tmp_path: Path) -> None:
    assert fs.choose_base("$SCRATCH", 0, 0, {"SCRATCH": str(tmp_path)}) == str(tmp_path)
    odd = tmp_path / "5$"
    odd.mkdir()
    assert fs.choose_base(str(odd), 0, 0, {}) == str(odd)
    with pytest.raises(NodeError, match=r"\$SCRATCH is not set on this node"):
        fs.choose_base("$SCRATCH/x", 0, 0, {})


def test_auto_takes_the_first_that_fits(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    env = {"SLURM_TMPDIR": str(one), "TMPDIR": str(two)}
    assert fs.choose_base("auto", 0, 0, env) == str(one)
    one.rmdir()
    assert fs.choose_base("auto", 0, 0, env) == str(two)
    assert fs.choose_base("auto", 0, 0, {}) == "/tmp"


def test_a_refusal_lists_all_candidates_and_how_to_move(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"SLURM_TMPDIR": str(tmp_path / "file"), "TMPDIR": "relative"}
    with pytest.raises(NodeError) as caught:
        fs.choose_base("auto", 10**18, 10**15, env)
    text = str(caught.value)
    assert f"$SLURM_TMPDIR = {tmp_path}/file: it is not a directory" in text
    assert "$TMPDIR = relative: it is not an absolute path" in text
    assert "/tmp: needs 1000000000.0 GB, " in text
    assert "/dev/shm: needs" in text
    assert f"needs {10**15} inodes, " in text
    assert "[cluster] node-root" in text
    assert "$STAGER_NODE_ROOT" in text


def test_a_named_directory_is_not_replaced_by_another(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="it does not exist"):
        fs.choose_base(str(tmp_path / "absent"), 0, 0, {"TMPDIR": str(tmp_path)})


def test_room_is_refused_by_its_facts() -> None:
    facts = fs.Facts("/x", "ext4", 999, None, noexec=True, read_only=True, shared=False)
    assert len(fs.refusals(facts, 1000, 5)) == 3
    assert len(fs.refusals(facts, 999, 5)) == 2


def test_sizes_for_people() -> None:
    assert [fs.size(n) for n in (0, 999, 1000, 1_380_000_000, 2 * 10**15)] == [
        "0 bytes", "999 bytes", "1.0 kB", "1.4 GB", "2000000.0 GB",
    ]  # fmt: skip


# --- the node root -------------------------------------------------------------------------------


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_makes_a_node_root_of_our_own(tmp_path: Path) -> None:
    before = os.umask(0o277)
    try:
        root = fs.secure_root(str(tmp_path))
    finally:
        os.umask(before)
    assert root == str(tmp_path / f"stager-{os.geteuid()}")
    assert sorted(os.listdir(root)) == ["envs", "incoming", "jobs", "locks"]
    assert {mode(root), *(mode(entry) for entry in Path(root).iterdir())} == {0o700}
    assert fs.secure_root(str(tmp_path)) == root


def test_closes_a_node_root_that_others_could_enter(tmp_path: Path) -> None:
    root = Path(fs.secure_root(str(tmp_path)))
    (root / "envs").chmod(0o777)
    root.chmod(0o755)
    fs.secure_root(str(tmp_path))
    assert (mode(root), mode(root / "envs")) == (0o700, 0o700)


def test_the_base_may_be_a_link_the_node_root_may_not(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    root = fs.secure_root(str(tmp_path / "link"))
    assert root == str(tmp_path / "real" / f"stager-{os.geteuid()}")


@pytest.mark.parametrize("inside", ["", "envs"])
def test_refuses_a_symbolic_link(tmp_path: Path, inside: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    place = tmp_path / f"stager-{os.geteuid()}" / inside
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(elsewhere)
    with pytest.raises(NodeError, match="symbolic link") as caught:
        fs.secure_root(str(tmp_path))
    assert caught.value.problem.where == str(place)
    assert not list(elsewhere.iterdir())
    assert mode(elsewhere) == 0o755


def test_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / f"stager-{os.geteuid()}").touch()
    with pytest.raises(NodeError, match="not a directory"):
        fs.secure_root(str(tmp_path))


@pytest.mark.parametrize("inside", ["", "envs"])
def test_refuses_what_belongs_to_another_user(tmp_path: Path, inside: str) -> None:
    needs_root()
    root = Path(fs.secure_root(str(tmp_path)))
    os.chown(root / inside, 12345, -1)
    with pytest.raises(NodeError, match="belongs to user 12345, not to user 0"):
        fs.secure_root(str(tmp_path))


def test_refuses_a_base_in_which_anyone_can_replace_it(tmp_path: Path) -> None:
    base = tmp_path / "open"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(NodeError, match="mode 0777, no sticky bit"):
        fs.secure_root(str(base))
    assert not list(base.iterdir())
    base.chmod(0o1777)
    assert Path(fs.secure_root(str(base))).is_dir()


def test_refuses_a_base_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="No such file"):
        fs.secure_root(str(tmp_path / "absent"))


def test_refuses_a_base_that_cannot_be_written() -> None:
    with pytest.raises(NodeError, match="stager-"):
        fs.secure_root("/proc/self")


def test_refuses_a_base_that_this_user_may_not_write() -> None:
    needs_root()
    with tempfile.TemporaryDirectory() as base:  # pytest's own is closed to other users
        os.chmod(base, 0o755)
        code = f"""
from bundle import fs
os.setresuid(12345, 12345, 12345)
for function in (lambda: fs.secure_root({base!r}), lambda: fs.choose_base({base!r}, 0, 0, {{}})):
    try:
        function()
    except fs.NodeError as exc:
        print(exc)
"""
        done = subprocess.run(
            [sys.executable, "-c", f"import os, sys; sys.path.insert(0, {str(REPO)!r})\n{code}"],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    said = done.stdout.splitlines()
    assert said[0].startswith(
        f"{base}/stager-12345: cannot be used as node root; Permission denied"
    )
    assert f"{base}: this user may not write to it" in said[1]


def test_many_at_once_agree(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(REPO)!r})\nfrom bundle import fs\n"
    code += f"print(fs.secure_root({str(tmp_path)!r}))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    roots = {process.communicate(timeout=60)[0].strip() for process in started}
    assert roots == {str(tmp_path / f"stager-{os.geteuid()}")}
