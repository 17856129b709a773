"""File systems as the kernel really has them: mounts made in a private mount namespace."""

from pathlib import Path

from tests.support.namespaces import namespace

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


def test_a_noexec_file_system_is_refused(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o noexec none {tmp_path}"
    assert "mounted noexec" in choose(mount, str(tmp_path))
    # ... and auto goes on to the next.
    other = tmp_path.parent
    assert choose(mount, "auto", SLURM_TMPDIR=str(tmp_path), TMPDIR=str(other)) == str(other)


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    said = choose(f"mount -t tmpfs -o ro none {tmp_path}", str(tmp_path))
    assert "mounted read-only" in said
    assert "may not write" not in said  # once is enough


def test_a_full_file_system_is_refused(tmp_path: Path) -> None:
    fill = f"mount -t tmpfs -o size=1m none {tmp_path}; head -c 1000k /dev/zero > {tmp_path}/f"
    said = choose(fill, str(tmp_path), bytes=100_000)
    assert "needs 100.0 kB, 24.6 kB are free" in said
    assert "[cluster] node-root" in said


def test_a_file_system_without_inodes_is_refused(tmp_path: Path) -> None:
    said = choose(f"mount -t tmpfs -o nr_inodes=50 none {tmp_path}", str(tmp_path), inodes=34255)
    assert "needs 34255 inodes, 4" in said


def test_tmpfs_without_an_inode_limit_does_not_count_them(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o nr_inodes=0 none {tmp_path}"
    code = f"{FS}facts = files.facts_of({str(tmp_path)!r})\n"
    code += "print(json.dumps([facts.fstype, facts.free_inodes]))"
    assert namespace("-m", mount, code) == ["tmpfs", None]
    assert choose(mount, str(tmp_path), inodes=10**12) == str(tmp_path)


def test_a_full_file_system_cannot_hold_a_node_root(tmp_path: Path) -> None:
    fill = f"mount -t tmpfs -o nr_inodes=3 none {tmp_path}; touch {tmp_path}/a {tmp_path}/b"
    code = f"""{FS}
from bundle.node.node_root import secure_root
try:
    secure_root({str(tmp_path)!r})
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
    code = f"{FS}print(json.dumps(files.mount_of({str(deep)!r}).point))"
    assert namespace("-m", shell, code) == str(tmp_path / "outer")
    shell += f"; mount -t tmpfs -o size=3m none '{deep}'"
    assert namespace("-m", shell, code) == str(deep)
