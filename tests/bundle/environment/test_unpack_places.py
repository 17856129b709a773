"""Where an environment cannot be put: file systems, owners, links, and how it is said."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stager.pack.bundle import Packed
from tests.support.bundles import BASE_PYTHON, CLEAN, OWN, refuses, run_node
from tests.support.namespaces import namespace
from tests.support.needs import needs


def in_namespace(shell: str, program: Path, bundle: Path, base: Path) -> tuple[int, str, list[str]]:
    """Unpack after ``shell`` has mounted what it likes: exit status, message, what is left."""
    code = f"""
import os, subprocess
argv = {[sys.executable, "-I", "-S", str(program), "unpack", str(bundle), str(base)]!r}
done = subprocess.run(
    [*argv, "--python", {BASE_PYTHON!r}], env={CLEAN!r}, capture_output=True, text=True)
own = os.path.join({str(base)!r}, {OWN!r})
left = [os.path.join(f, n) for f in ("envs", "incoming")
        for n in (os.listdir(os.path.join(own, f)) if os.path.isdir(os.path.join(own, f)) else ())]
print(json.dumps([done.returncode, done.stderr, left]))
"""
    answer = namespace("-m", shell, code)
    assert isinstance(answer, Sequence)
    assert "Traceback" not in answer[1]
    return answer[0], answer[1], answer[2]


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        ("-o size=20m", "are free"),  # refused before anything is written
        ("-o nr_inodes=1000", "inodes, 9"),
        ("-o noexec", "mounted noexec"),
        ("-o ro", "mounted read-only"),
        ("-o size=36m", "are free"),
        ("-o nr_inodes=20", "inodes"),
    ],
)
def test_a_file_system_without_room_is_refused(
    many: Packed, program: Path, base: Path, mount: str, says: str
) -> None:
    code, said, left = in_namespace(f"mount -t tmpfs {mount} none {base}", program, many.path, base)
    assert (code, left) == (1, [])
    assert says in said
    assert "node-root" in said
    assert str(base) in said


def test_with_room_in_the_same_place_it_works(many: Packed, program: Path, base: Path) -> None:
    code, said, left = in_namespace(
        f"mount -t tmpfs -o size=80m none {base}", program, many.path, base
    )
    assert (code, said, left) == (0, "", [f"envs/{many.manifest.id}"])


def test_a_node_root_that_is_a_link_is_refused(
    standard: Packed, program: Path, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (base / OWN).symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refuses(program, standard.path, base)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_node_root_of_somebody_else_is_refused(
    standard: Packed, program: Path, base: Path
) -> None:
    needs("root")
    (base / OWN).mkdir(mode=0o700)
    os.chown(base / OWN, 12345, 12345)
    assert "belongs to user 12345" in refuses(program, standard.path, base)


def test_a_node_root_open_to_others_is_closed(standard: Packed, program: Path, base: Path) -> None:
    (base / OWN).mkdir()
    (base / OWN).chmod(0o770)
    assert run_node(program, "unpack", standard.path, base).returncode == 0
    assert (base / OWN).stat().st_mode & 0o777 == 0o700


def test_a_lock_that_is_a_link_is_not_followed(
    standard: Packed, program: Path, base: Path, tmp_path: Path
) -> None:
    (base / OWN / "locks").mkdir(parents=True)
    (base / OWN / "locks" / f"{standard.manifest.id}.lock").symlink_to(tmp_path / "victim")
    assert "cannot be written" in refuses(program, standard.path, base)
    assert not (tmp_path / "victim").exists()


def test_where_child_processes_cannot_be_waited_for(
    standard: Packed, program: Path, base: Path
) -> None:
    """SIGCHLD ignored by whoever started it, which passes through exec: children vanish."""
    line = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    line += "os.execv(sys.argv[1], sys.argv[1:])"
    argv = [sys.executable, "-c", line, sys.executable, "-I", "-S", program, "unpack"]
    done = subprocess.run(
        [*map(str, argv), standard.path, base], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
