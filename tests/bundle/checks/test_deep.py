"""A node is checked thoroughly: every byte of its environment, names, and reaching the head."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from bundle.checks import deep
from bundle.checks.deep import (
    SHOWN,
    connect_to_head,
    find_damaged_files,
    remove_damaged_environment,
    resolve_names,
    wait_for_nodes,
)
from bundle.environment.unpack import hold_during
from bundle.node.node_root import make_secure_root
from bundle.protocol.problem import NodeError, ProblemCode
from stager.pack.bundle import Packed
from tests.support.bundles import HERE, left_over, rot, stage, tree
from tests.support.namespaces import namespace
from tests.support.needs import lacks
from tests.support.ports import unused_port
from tests.support.processes import until

SITE = f"lib/python{HERE.python}/site-packages"


@pytest.fixture(scope="module")
def sound(standard: Packed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(stage(standard, tmp_path_factory.mktemp("sound")).path)


@pytest.fixture
def port() -> int:
    return unused_port()


@pytest.fixture
def copy(sound: Path, base: Path) -> Path:
    root = Path(make_secure_root(str(base)))
    shutil.copytree(sound, root / "envs" / sound.name, symlinks=True)
    return root / "envs" / sound.name


def found(copy: Path, processes: int = 2) -> dict[str, str]:
    """What is said about which path; each says what to do."""
    problems = find_damaged_files(str(copy), processes)
    assert {problem.code for problem in problems} <= {ProblemCode.ENVIRONMENT_DAMAGED}
    assert {"stager clean --nodes" in problem.fix for problem in problems} <= {True}
    return {os.path.relpath(problem.where, copy): problem.why for problem in problems}


@pytest.mark.parametrize("processes", [1, 5])
def test_a_sound_environment_has_no_problems(copy: Path, processes: int) -> None:
    before = tree(copy)
    assert found(copy, processes) == {}
    assert tree(copy) == before
    assert list((copy.parents[1] / "incoming").iterdir()) == []


def test_every_kind_of_damage_is_found_at_once_and_named(copy: Path) -> None:
    rot(copy / "project" / "main.py")
    (copy / "project" / "empty").write_text("x")
    (copy / "project" / "inner" / "tool.sh").chmod(0o644)
    (copy / "project" / "inner" / "up").unlink()
    (copy / SITE / "sitecustomize.py").write_text("import os\n")
    (copy / "bin" / "cli-tool").unlink()
    (copy / "pkgs").unlink()
    (copy / "pkgs").symlink_to("/tmp")
    (copy / "more" / "deep").mkdir(parents=True)
    (copy / "more" / "deep" / "file").touch()
    said = found(copy)
    assert said.pop("project/main.py").startswith("its sha256 begins with ")
    assert said == {
        "project/empty": "it has 1 byte, not 0",
        "project/inner/tool.sh": "its mode is 0644, not 0755",
        "project/inner/up": "it is missing; it must lead to ../main.py",
        f"{SITE}/sitecustomize.py": "it does not belong there",
        "bin/cli-tool": "it is missing",
        "pkgs": f"it leads to /tmp, not to {SITE}",
        "more": "it does not belong there",
    }


def test_one_byte_of_each_file_in_turn_is_noticed(copy: Path) -> None:
    names = [name for name, (mode, data) in tree(copy).items() if mode != "link" and data]
    assert len(names) > 40
    for name in names[:: max(1, len(names) // 8)]:
        rot(copy / name)
        said = found(copy, 1)
        assert said, name
        if not name.startswith(".stager/") or name.startswith(".stager/site/"):
            assert list(said) == [name]
        rot(copy / name)
    assert found(copy) == {}


def test_things_that_are_no_files_do_not_hang_it(copy: Path) -> None:
    for name in ("main.py", "empty"):
        (copy / "project" / name).unlink()
    os.mkfifo(copy / "project" / "main.py")
    (copy / "project" / "empty").symlink_to("main.py")
    shutil.rmtree(copy / "assets")
    (copy / "assets").symlink_to("project")
    shutil.rmtree(copy / "project" / "inner")
    said = found(copy)
    gone = {name for name in said if name.startswith("project/inner")}
    assert gone == {"project/inner", "project/inner/tool.sh", "project/inner/up"}
    assert said["project/main.py"] == "it is not a file any more"
    assert said["project/empty"] == "it is a symbolic link now, to main.py"
    assert said["assets"] == "it does not belong there"


@pytest.mark.parametrize(
    "own",
    ["pyvenv.cfg", *(f"_stager_{name}" for name in ("patches.py", "patches.pth", "imports.py"))],
)
def test_the_environments_own_files_count_too(copy: Path, own: str) -> None:
    path = own if own == "pyvenv.cfg" else f"{SITE}/{own}"
    (copy / path).write_text("home = /elsewhere\n")
    assert path in found(copy)
    (copy / path).unlink()
    assert path in found(copy)


def test_an_interpreter_that_has_gone_and_one_that_is_being_renewed(copy: Path) -> None:
    (copy / "bin" / "python.4711-99").symlink_to("/somewhere/python")
    (copy / "pyvenv.cfg.4711-99").touch()
    python = copy / "bin" / "python"
    target = os.readlink(python)
    assert set(found(copy)) <= {"bin/python.4711-99"}
    (copy / "bin" / "python.4711-99").unlink()
    python.unlink()
    assert found(copy)["bin/python"].startswith("it is missing or no link: No such file")
    python.symlink_to(os.path.join(os.path.dirname(target), "python-of-long-ago"))
    said = found(copy)
    assert set(said) == {"bin/python", "pyvenv.cfg"}
    assert said["bin/python"] == "it leads to no program that can be run"


@pytest.mark.parametrize("damage", ["cut", "other", "missing"])
def test_what_it_is_compared_with_is_compared_itself(
    copy: Path, damage: str, single: Packed
) -> None:
    kept_files = [copy / ".stager" / name for name in ("listing", "manifest.json")]
    kept_files.append(min((copy / ".stager" / "layers").iterdir()))
    for kept in kept_files:
        whole = kept.read_bytes()
        if damage == "missing":
            kept.unlink()
        else:
            kept.write_bytes(whole[:-7] if damage == "cut" else single.manifest.to_bytes())
        said = found(copy)
        assert list(said) == [".stager/listing" if kept.name == "listing" else "."], kept
        kept.write_bytes(whole)
    assert found(copy) == {}


def test_many_are_counted_and_names_are_escaped(copy: Path) -> None:
    for number in range(SHOWN + 15):
        (copy / SITE / f"stray{number:02}.py").touch()
    problems = find_damaged_files(str(copy), 2)
    assert len(problems) == SHOWN + 1
    assert problems[0].where == str(copy / SITE / "stray00.py")
    assert problems[-1].why == "15 more paths in it differ from what was built"
    for name in ("bin/red\x1b[31m", os.fsdecode(b"bin/\xff")):  # which cannot be shown
        (copy / name).touch()
    said = json.dumps([problem.to_json() for problem in find_damaged_files(str(copy), 2)])
    assert "\\\\x1b[31m" in said
    assert "\\\\udcff" in said


# --- out of service ------------------------------------------------------------------------------


def test_a_discarded_environment_is_made_anew(single: Packed, base: Path) -> None:
    made = stage(single, base)
    root = os.path.dirname(os.path.dirname(made.path))
    rot(Path(made.path, SITE, "single", "__init__.py"))
    assert stage(single, base).reused  # nothing looks at every byte on the way
    assert find_damaged_files(made.path, 1) != []
    assert remove_damaged_environment(root, single.manifest.id)
    assert left_over(base) == []
    assert not remove_damaged_environment(root, single.manifest.id)
    assert not stage(single, base).reused
    assert find_damaged_files(made.path, 1) == []


def test_one_that_is_in_use_stays(copy: Path) -> None:
    root = str(copy.parents[1])
    with hold_during(root, copy.name):  # a lock of an open file: another process is no other case
        with pytest.raises(NodeError, match="a job on this node is using it"):
            remove_damaged_environment(root, copy.name)
        assert found(copy) == {}  # to look at it is possible all the same
    assert remove_damaged_environment(root, copy.name)


def test_names_are_looked_up_by_the_machine_itself() -> None:
    found = resolve_names(["localhost", "no-such-name.invalid", "localhost"])
    assert list(found) == ["localhost", "no-such-name.invalid"]
    assert found["no-such-name.invalid"] == []
    assert "127.0.0.1" in found["localhost"] or "::1" in found["localhost"]
    assert resolve_names([]) == {}


# --- the way to the head -------------------------------------------------------------------------


def test_every_node_reaches_the_head_whoever_begins(port: int) -> None:
    before = threading.active_count()
    nodes = [f"n{number}" for number in range(2, 30)]
    with ThreadPoolExecutor(len(nodes)) as pool:
        tries = [
            pool.submit(connect_to_head, "127.0.0.1", port, "77", node, 240.0) for node in nodes
        ]
        time.sleep(0.5)  # some have been refused by now
        assert wait_for_nodes("127.0.0.1", port, "77", nodes, 240.0) == []
        assert all(one.result() >= 0 for one in tries)
    assert threading.active_count() == before
    with socket.create_server(("127.0.0.1", port)):
        pass  # free again at once


def test_who_does_not_come_is_named_and_strangers_do_not_count(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = [0.0]  # of the clock
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(deep, "time", clock)
    with ThreadPoolExecutor(3) as pool:
        head = pool.submit(wait_for_nodes, "127.0.0.1", port, "77", ["n2", "n3", "n4"], 3600.0)
        came = pool.submit(connect_to_head, "127.0.0.1", port, "77", "n2", 3600.0)
        stranger = pool.submit(connect_to_head, "127.0.0.1", port, "78", "n3", 3600.0)
        try:
            assert came.result() >= 0
            with pytest.raises(NodeError, match="another program listens there"):
                stranger.result()
            for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000):
                peer = socket.create_connection(("127.0.0.1", port))
                with peer, suppress(OSError):  # it may have hung up already
                    peer.sendall(nonsense)
                    peer.shutdown(socket.SHUT_WR)
                    peer.recv(100)  # it has been looked at
        finally:
            ahead[0] = 3600.0
            with suppress(OSError):  # wakes the head, whose time is over, if it has not ended
                socket.create_connection(("127.0.0.1", port)).close()
        assert head.result() == ["n3", "n4"]


def test_a_node_that_stands_still_once_it_has_come_counts(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its answer, and does not get to hanging up."""
    monkeypatch.setattr(deep, "_PATIENCE", 0.1)
    with ThreadPoolExecutor(1) as pool:
        head = pool.submit(wait_for_nodes, "127.0.0.1", port, "77", ["n2"], 3600.0)
        with socket.socket() as peer:
            assert until(lambda: peer.connect_ex(("127.0.0.1", port)) in (0, errno.EISCONN))
            peer.sendall(b"stager 77 n2\n")
            assert head.result() == []


def test_a_head_that_hangs_up_without_a_word_is_asked_again(port: int) -> None:
    """It had waited for a line that a node, which stood still, sent too late."""
    with socket.create_server(("127.0.0.1", port)) as server, ThreadPoolExecutor(1) as pool:
        trying = pool.submit(connect_to_head, "127.0.0.1", port, "77", "n2", 3600.0)
        for answer in (b"", b"stager 77\n"):
            peer, _ = server.accept()
            with peer:
                assert peer.recv(100) == b"stager 77 n2\n"
                peer.sendall(answer)
        assert trying.result() >= 0


def test_a_port_that_is_taken_and_one_where_nobody_listens(port: int) -> None:
    with pytest.raises(NodeError, match=r"refused for 0\.5 s") as error:
        connect_to_head("127.0.0.1", port, "77", "n2", 0.5)
    assert error.value.problem.where == f"127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port)):  # and says nothing
        with pytest.raises(NodeError, match=r"nothing answered within 0\.5 s"):
            connect_to_head("127.0.0.1", port, "77", "n2", 0.5)
        with pytest.raises(NodeError, match="cannot listen") as error:
            wait_for_nodes("127.0.0.1", port, "77", ["n2"], 5.0)
    assert error.value.problem.where == f"127.0.0.1:{port}"
    assert "already in use" in error.value.problem.why


WALL = """from bundle.checks.deep import connect_to_head
from bundle.protocol.problem import NodeError
try:
    connect_to_head("10.77.0.2", 61000, "77", "n2", 1.5)
    said = "reached"
except NodeError as error:
    said = error.problem.to_json()
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("shell", "named"),
    [
        # Nobody at the other end is meant, and nothing comes back. Without an entry for it the
        # kernel would ask who has that address, and say after three seconds that nobody has.
        (
            "ip link add v0 type veth peer name v1; ip link set v1 up\n"
            "ip addr add 10.77.0.1/24 dev v0; ip link set v0 up\n"
            "ip neigh add 10.77.0.2 lladdr 02:00:00:00:00:77 dev v0 nud permanent",
            "no answer within 1.5 s",
        ),
        ("ip link set lo up", "unreachable"),
    ],
)
def test_no_way_there(shell: str, named: str) -> None:
    problem = namespace("-n", shell, WALL)
    assert isinstance(problem, dict)
    assert problem["what"] == "the head node cannot be reached"
    assert named in problem["why"]
    assert problem["fix"]


def test_the_ipv6_address_of_a_head(port: int) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        lacks("ipv6", "no socket can be made at ::1")
    with ThreadPoolExecutor(1) as pool:
        head = pool.submit(wait_for_nodes, "::1", port, "77", ["n2"], 3600.0)
        assert connect_to_head("::1", port, "77", "n2", 3600.0) >= 0
        assert head.result() == []
