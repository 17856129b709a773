"""File systems: recorded mount tables, and what matters of a directory."""

import shutil
from pathlib import Path

import pytest

from bundle.protocol.problem import NodeError
from bundle.system import files
from tests.support.namespaces import namespace

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


def test_a_table_of_mounts_is_read() -> None:
    mounts = files.parse_mounts(TABLE)
    assert len(mounts) == 11
    ways = {mount.point: mount.options for mount in mounts}
    assert {"rw", "noexec"} <= ways["/tmp/my disk"]
    assert "ro" in ways["/ro"] & ways["/super"]  # of the mount, and of the file system


def test_shared_file_systems() -> None:
    names = [*SHARED.split(), *LOCAL.split()]
    shared = [name for name in names if files.Mount(1, "/", name, frozenset()).is_shared]
    assert shared == SHARED.split()


def test_a_directory_in_a_chroot_is_judged_by_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the mounts that the kernel lists there holds it."""
    listed = files.examine_directory(str(tmp_path))
    monkeypatch.setattr(files, "parse_mounts", lambda text: [])
    facts = files.examine_directory(str(tmp_path))
    assert (facts.fstype, facts.shared) == ("unknown", False)
    assert (facts.noexec, facts.read_only) == (listed.noexec, listed.read_only) == (False, False)
    assert facts.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    with pytest.raises(NodeError, match="No such file"):
        files.examine_directory(str(tmp_path / "absent"))


FS = "from bundle.node import node_root as location\nfrom bundle.system import files\n"
CHOOSE = """
try:
    print(json.dumps(location.choose_base({setting!r}, {env!r}, ({bytes}, {inodes}))))
except location.NodeError as exc:
    print(json.dumps(str(exc)))
"""


def choose(shell: str, setting: str, bytes: int = 0, inodes: int = 0, **env: str) -> str:
    code = FS + CHOOSE.format(setting=setting, bytes=bytes, inodes=inodes, env=env)
    return str(namespace("-m", shell, code))


@pytest.mark.parametrize(
    ("options", "needs", "why"),
    [
        ("noexec", {}, "mounted noexec"),
        ("ro", {}, "mounted read-only"),
        ("size=1m", {"bytes": 100_000}, "needs 100.0 kB, 24.6 kB are free"),
        ("nr_inodes=50", {"inodes": 34255}, "needs 34255 inodes, 4"),
    ],
)
def test_a_file_system_is_refused(
    tmp_path: Path, options: str, needs: dict[str, int], why: str
) -> None:
    mount = f"mount -t tmpfs -o {options} none {tmp_path}"
    if options == "size=1m":
        mount += f"; head -c 1000k /dev/zero > {tmp_path}/f"
    said = choose(mount, str(tmp_path), **needs)
    assert why in said
    assert "[cluster] node-root" in said
    assert ("may not write" in said) is False, "once is enough"


def test_tmpfs_without_an_inode_limit_does_not_count_them(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o nr_inodes=0 none {tmp_path}"
    code = f"{FS}facts = files.examine_directory({str(tmp_path)!r})\n"
    code += "print(json.dumps([facts.fstype, facts.free_inodes]))"
    assert namespace("-m", mount, code) == ["tmpfs", None]
    assert choose(mount, str(tmp_path), inodes=10**12) == str(tmp_path)


def test_a_full_file_system_cannot_hold_a_node_root(tmp_path: Path) -> None:
    fill = f"mount -t tmpfs -o nr_inodes=3 none {tmp_path}; touch {tmp_path}/a {tmp_path}/b"
    code = f"""{FS}
from bundle.node.node_root import make_secure_root
try:
    make_secure_root({str(tmp_path)!r})
except location.NodeError as exc:
    print(json.dumps(str(exc)))
"""
    assert "No space left on device" in str(namespace("-m", fill, code))


def test_stacked_and_hidden_mounts_as_the_kernel_has_them(tmp_path: Path) -> None:
    deep = tmp_path / "outer" / "in ner"
    deep.mkdir(parents=True)
    shell = f"""
        mount -t tmpfs -o size=1m none '{deep}'
        mount -t tmpfs -o size=2m none '{tmp_path}/outer'
        mkdir '{deep}'"""
    code = f"{FS}print(json.dumps(files.find_mount({str(deep)!r}).point))"
    assert namespace("-m", shell, code) == str(tmp_path / "outer")
    shell += f"; mount -t tmpfs -o size=3m none '{deep}'"
    assert namespace("-m", shell, code) == str(deep)
