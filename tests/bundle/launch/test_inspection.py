"""Where ranks are: real processes under the real run wrapper, as they hang in many ways."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bundle
from bundle.launch import inspection
from bundle.launch.inspection import ask_nccl, ask_rank, inspect_ranks, start_inspector
from bundle.protocol.codec import decode
from bundle.protocol.messages import UNASKED, CollectiveState, RankState, RankStates
from tests.support.ports import held_port, unused_port
from tests.support.processes import until

WRAPPER = Path(bundle.__file__).parent / "launch" / "wrapper.py"
HEAD = """\
import ctypes, multiprocessing, os, signal, sys, threading, time
STACKS = signal.SIGRTMAX - 3

def ready():
    print("ready", flush=True)

def hold_gil():
    # What says so is started while the GIL is held.
    ctypes.PyDLL(None).system(b"echo ready; exec sleep 600 >&-")

"""


class Node:
    """The directory of a job with a path too long for a socket, and its ranks."""

    def __init__(self, folder: Path) -> None:
        self.job_dir = folder / ("long" * 30)
        self.folder = self.job_dir / "watch"
        self.folder.mkdir(parents=True)
        shutil.copy(WRAPPER, self.job_dir / "run_wrapper.py")
        self.program = folder / "program.py"
        self.ranks: dict[int, subprocess.Popen[str]] = {}

    def start(self, source: str, ranks: int = 1, **variables: str) -> None:
        """Start ranks, and wait until each says that it is ready."""
        self.program.write_text(HEAD + textwrap.dedent(source))
        for rank in range(ranks):
            env = {name: each for name, each in os.environ.items() if not name.startswith("STAGER")}
            env |= {"STAGER_JOB_DIR": str(self.job_dir), "STAGER_WATCH": "1", **variables}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            argv = [sys.executable, str(self.job_dir / "run_wrapper.py"), str(self.program)]
            self.ranks[rank] = subprocess.Popen(
                argv, env=env, text=True, stdout=subprocess.PIPE, start_new_session=True
            )
        for rank in range(ranks):
            assert self.read_line(rank) == "ready\n"

    def read_line(self, rank: int = 0) -> str:
        output = self.ranks[rank].stdout
        assert output is not None
        return output.readline()

    def look(self) -> tuple[RankState, ...]:
        return inspect_ranks(str(self.folder), self.list_pids())

    def list_pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self.ranks.items()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for process in node.ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def places(state: RankState, thread: int = 0) -> list[str]:
    return [frame.rpartition("/")[2] for frame in state.threads[thread].frames]


# --- Stacks --------------------------------------------------------------------------------------

HANGS = {
    "a lock": """
        lock = threading.Lock()
        lock.acquire()
        ready()
        lock.acquire()
        """,
    "the GIL": "hold_gil()",
    "the GIL, as another thread": """
        threading.Thread(target=hold_gil).start()
        signal.pause()
        """,
    "all signals blocked": """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ready()
        time.sleep(600)
        """,
    "a handler of its own": """
        signal.signal(STACKS, lambda *_: os._exit(1))
        ready()
        time.sleep(600)
        """,
    "at work": """
        ready()
        while True:
            pass
        """,
}


@pytest.mark.parametrize("how", HANGS)
def test_the_stack_of_a_rank_that_hangs(
    node: Node, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "GIL" in how:
        monkeypatch.setattr(inspection, "_RANK_SECONDS", 0.5)
    body = textwrap.indent(textwrap.dedent(HANGS[how]), "    ")
    node.start(f"def read_shard():\n{body}\nread_shard()")
    (state,) = node.look()
    assert (state.rank, state.process.pid, state.no_answer) == (0, node.ranks[0].pid, "")
    assert state.process.state in ("R", "S")
    assert [thread.name for thread in state.threads] == ["main"]
    *_, inner, outer = places(state)
    assert (inner.endswith(" read_shard"), outer.endswith(" <module>")) == (True, True)
    assert inner.startswith("program.py:")
    assert state.groups == ()
    assert len(state.children) == ("GIL" in how)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("signal.signal(STACKS, signal.SIG_DFL); hold_gil()", "removed the handler"),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS]); hold_gil()", "blocks signals"),
        ("ready(); os.execv('/bin/sleep', ['sleep', '600'])", "another program"),
        (
            """
            caught = "import signal, time\\nfor each in range(34, 65):"
            caught += "signal.signal(each, lambda number, frame: print(number, flush=True))"
            caught += "\\nprint('ready', flush=True); time.sleep(600)"
            os.execv(sys.executable, [sys.executable, "-c", caught])
            """,
            "closed the file",
        ),
        (
            """
            os.closerange(3, 50)
            others = [open(f"{__file__}.{number}", "w") for number in range(5)]
            hold_gil()
            """,
            "closed the file",
        ),
    ],
)
def test_a_rank_that_may_be_hurt_is_not_signalled(
    node: Node, source: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_RANK_SECONDS", 0.3)
    node.start(textwrap.dedent(source))
    if "sleep'" in source:
        name = Path(f"/proc/{node.ranks[0].pid}/comm")
        until(lambda: name.read_text() == "sleep\n", 300)
    (state,) = node.look()
    assert why in state.no_answer
    assert state.threads == ()
    assert node.ranks[0].poll() is None
    os.killpg(node.ranks[0].pid, signal.SIGKILL)
    assert node.read_line() == ""
    assert all(not path.read_text() for path in node.program.parent.glob("program.py.*"))


def test_a_socket_that_the_program_has_closed_is_not_used(node: Node) -> None:
    """Nor what has its descriptor then, be it a server of the program's own."""
    node.start("""
        import socket
        os.closerange(3, 50)
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
        ready()
        print(*(each.getsockname()[1] for each in servers), flush=True)
        for each in servers:
            each.accept()[0].sendall(b"mine")
        """)
    ports = list(map(int, node.read_line().split()))
    node.look()
    for port in ports:
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert client.recv(4) == b"mine"
    assert node.ranks[0].wait(300) == 0


def test_a_rank_that_is_stopped_goes_on_as_before(node: Node) -> None:
    node.start("ready(); signal.pause()")
    node.ranks[0].send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, node.ranks[0].pid, os.WSTOPPED | os.WNOWAIT)
    (state,) = node.look()
    assert (state.process.state, state.threads) == ("T", ())
    assert state.no_answer == "it is stopped"
    node.ranks[0].send_signal(signal.SIGCONT)
    until(lambda: node.look()[0].threads != (), 300)


def test_ranks_that_have_ended_and_one_that_ends_while_it_is_asked(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = inspection._find_obstacle

    def kill(pid: int, *more: Any) -> str:
        why = find(pid, *more)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return why

    monkeypatch.setattr(inspection, "_find_obstacle", kill)
    monkeypatch.setattr(inspection, "_RANK_SECONDS", 0.3)
    node.start("ready()\nif os.environ['RANK'] == '0': hold_gil()", ranks=2)
    os.waitid(os.P_PID, node.ranks[1].pid, os.WEXITED | os.WNOWAIT)
    (state,) = node.look()
    assert (state.rank, state.threads, state.no_answer) == (0, (), "it has ended")
    assert node.look() == ()


def test_the_stacks_of_children_without_what_they_have_of_their_parent(node: Node) -> None:
    node.start("""
        def load():
            ready()
            threading.Event().wait()

        context = multiprocessing.get_context("fork")
        worker = context.Process(target=load)
        worker.start()
        worker.join()
        """)
    assert until(lambda: node.look()[0].children[0].state == "S", 60)  # it says so before it waits
    (state,) = node.look()
    (child,) = state.children
    assert child.pid != state.process.pid
    main, worker = state.threads
    assert (main.name, worker.name) == ("main", f"process {child.pid}")
    assert any(place.endswith(" join") for place in places(state))
    assert [
        place.partition(" ")[2] for place in places(state, 1) if place.startswith("program.py")
    ] == ["load"]


def test_many_threads_and_a_deep_stack(node: Node) -> None:
    node.start("""
        over = threading.Event()
        for number in range(120):
            threading.Thread(target=over.wait, name=f"saver {number}", daemon=True).start()

        def go_down(levels):
            if levels:
                go_down(levels - 1)
            ready()
            over.wait()

        go_down(150)
        """)
    (state,) = node.look()
    names = [thread.name for thread in state.threads]
    assert (len(names), names[0], all(name.startswith("saver ") for name in names[1:])) == (
        *(32, "main", True),
    )
    found = places(state)
    assert (len(found), found[0].endswith(" wait"), found[-1].endswith(" <module>")) == (
        *(40, True, True),
    )


def test_a_program_without_the_watch(node: Node) -> None:
    node.start("ready(); time.sleep(600)", STAGER_WATCH="")
    assert list(node.folder.iterdir()) == []
    assert node.look()[0].no_answer == "it cannot be asked for its stack"


def test_a_directory_that_is_missing_fails_no_rank(node: Node) -> None:
    node.folder.rmdir()
    node.start("ready()")
    assert node.ranks[0].wait(300) == 0


# --- Collectives ---------------------------------------------------------------------------------


def entry(number: int, name: str = "nccl:all_reduce", **fields: object) -> dict[str, object]:
    return {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "is_p2p": False,
        "state": "completed",
        "retired": True,
        "input_sizes": [[32, 10], []],
        "input_dtypes": ["Float", "Int"],
        "output_sizes": [[64, 10]],
        "output_dtypes": ["Float"],
        **fields,
    }


@contextlib.contextmanager
def answering(folder: Path, answer: Callable[[socket.socket], None]) -> Iterator[str]:
    path = str(folder / "3.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def serve() -> None:
            client, _ = server.accept()
            with client, contextlib.suppress(OSError):
                answer(client)

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join()


def read(folder: Path, *lines: object) -> list[CollectiveState]:
    answer = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with answering(folder, lambda client: client.sendall(answer)) as path:
        return list(ask_rank(path, 300)[1])


def test_numbers_of_collectives(tmp_path: Path) -> None:
    """NCCL's are complete when their kernel is, Gloo's when they are retired."""
    pair: dict[str, Any] = {"pg_id": 2, "process_group": ["1", "mesh_tp"]}
    other: dict[str, Any] = {"pg_id": 1, "process_group": ["0", "default_pg"]}
    entries = [
        entry(9, **other),  # a later group has its name
        entry(1, pg_id=5),
        entry(2, "nccl:_all_gather_base", pg_id=5, state="started", retired=False),
        entry(3, pg_id=5, state="scheduled", retired=False, input_sizes=[[1]] * 6),
        entry(8, "nccl:send", pg_id=5, is_p2p=True),
        entry(4, state="scheduled", **pair),  # it has timed out
        entry(6, pg_id=7, process_group=["9", "destroyed"]),
    ]
    gloo = [
        entry(6, "gloo:barrier", state="scheduled", output_sizes=[], input_sizes=[]),
        entry(7, "gloo:broadcast", state="scheduled", retired=False),
    ]
    groups: tuple[dict[str, Any], ...] = (
        {"name": "0", "desc": "default_pg", "ranks": [0, 1, 2], "backends": "cpu:gloo,cuda:nccl"},
        {"name": "1", "desc": "mesh_tp", "ranks": [0, 2], "backends": "cuda:nccl"},
        {"name": "2", "desc": "undefined", "ranks": [0, 1, 2], "backends": "cpu:gloo"},
        {"name": "3", "desc": "mesh_tp", "ranks": [0, 2], "backends": "cuda:nccl"},
    )
    found = read(tmp_path, {"groups": groups}, {"entries": gloo}, {"entries": entries, "x": 1})
    shapes = "[32, 10] Float, [] Int -> [64, 10] Float"
    assert found == [
        CollectiveState("default_pg (gloo)", (), 7, -1, 6, "broadcast", shapes),
        CollectiveState(
            *("default_pg (nccl)", (), 3, 2, 1, "all_reduce"),
            "[1] Float, [1] Int, 2 more -> [64, 10] Float",
        ),
        CollectiveState("mesh_tp 1", (0, 2), 4, -1, 3, "all_reduce", shapes),
        CollectiveState("2", ()),
        CollectiveState("mesh_tp 3", (0, 2)),
    ]


def test_records_that_are_odd_are_passed_over(tmp_path: Path) -> None:
    odd: list[object] = [None, {}, 7, entry("x"), entry(1, process_group=["only one"])]  # type: ignore[arg-type]
    huge = {**entry(1), "pg_id": int("9" * 300), "input_sizes": [["x"], [1]]}
    groups = [[], {"desc": "nameless"}, {"name": "0", "desc": "a", "ranks": ["x", 1]}]
    lines = ([], {"entries": {}}, {"groups": groups}, {"entries": [*odd, huge, entry(5)]})
    numbers = {state.group: (state.ranks, state.enqueued) for state in read(tmp_path, *lines)}
    assert numbers == {"a": ((), 5)}


@pytest.mark.parametrize(
    "answer",
    [
        lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n\0\xff" * 100),
        lambda client: client.sendall(b"[" * 1_000_000 + b"\n"),
        lambda client: client.sendall(b'{"entries": [' + b"1" * 1_000_000 + b"]}\n"),
        lambda client: client.recv(1),
        lambda client: [client.sendall(b"[1]\n" * 10_000) for _ in iter(int, 1)],
    ],
    ids=["rubbish", "deep", "long number", "never", "endless"],
)
def test_an_answer_that_is_none(
    tmp_path: Path, answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_ANSWER_BYTES", 4 << 20)
    with answering(tmp_path, answer) as path:
        assert ask_rank(path, 0.5) == ((), ())


def test_what_pytorch_says(node: Node) -> None:
    """Rank 1 has not entered what rank 0 waits in; rank 0 sends more, which does not count."""
    pytest.importorskip("torch")
    port = str(held_port())
    node.start(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        alone = [dist.new_group([each], group_desc="alone") for each in range(2)][rank]
        dist.all_reduce(torch.ones(3))
        if rank:
            dist.recv(torch.ones(1))
            ready()
            threading.Event().wait()
        dist.send(torch.ones(1), 1)
        ready()
        dist.all_reduce(torch.ones(2, 4))
        """,
        ranks=2,
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
    )
    until(lambda: [group.enqueued for group in node.look()[0].groups] == [2, -1], 300)
    ahead, behind = node.look()
    shapes = "[2, 4] Float -> [2, 4] Float"
    assert ahead.groups == (
        CollectiveState("default_pg", (), 2, -1, 1, "all_reduce", shapes),
        CollectiveState("alone", (0,)),
    )
    assert behind.groups == (
        CollectiveState("default_pg", (), 1, -1, 1, "all_reduce", "[3] Float -> [3] Float"),
        CollectiveState("alone", (1,)),
    )
    assert any(place.endswith(" all_reduce") for place in places(ahead))
    assert [thread.name for thread in ahead.threads] == ["main"]  # not the wrapper's own
    assert places(behind)[0].endswith(" wait")


# --- Questions -----------------------------------------------------------------------------------


def test_each_question_has_its_answer(node: Node) -> None:
    node.start("ready(); time.sleep(600)")
    sent: list[RankStates] = []
    pids = node.list_pids()
    with start_inspector(str(node.folder), lambda: pids, sent.append) as ask:
        for number in (7, UNASKED, 8):
            ask(number)
        until(lambda: len(sent) == 3, 300)
        assert sorted(event.number for event in sent) == [UNASKED, 7, 8]
        assert all(event.ranks[0].threads for event in sent)
        raw = {**sent[0].to_json()}
        assert decode(RankStates, {key: raw[key] for key in ("node", "ranks", "number")}) == sent[0]
        pids = {}
        ask()  # nobody wants to know that there is no such rank
        ask(9)
        until(lambda: len(sent) == 4, 300)
    assert (sent[3].number, sent[3].ranks) == (9, ())
    assert node.ranks[0].poll() is None


# --- NCCL's RAS service --------------------------------------------------------------------------

RAS = """
import socketserver

class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        assert self.rfile.readline() == b"timeout 1\\n"
        self.wfile.write(OK)
        assert self.rfile.readline() == b"verbose status\\n"
        self.wfile.write(f"NCCL of {os.getpid()}\\n".encode())

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = allow_reuse_port = True

    def server_bind(self):
        self.socket.setsockopt(socketserver.socket.SOL_SOCKET, socketserver.socket.SO_REUSEPORT, 1)
        super().server_bind()

with Server(("127.0.0.1", int(os.environ["NCCL_RAS_ADDR"].rpartition(":")[2])), Answer) as server:
    ready()
    server.serve_forever()
"""


def test_nccl_is_asked_through_a_process_of_the_job(node: Node, tmp_path: Path) -> None:
    address = f"127.0.0.1:{unused_port()}"
    node.start(f'OK = b"OK\\n"{RAS}', NCCL_RAS_ADDR=address)
    program = tmp_path / "other.py"  # another job of this user's, which NCCL lets share the port
    program.write_text(node.program.read_text())
    env = {**os.environ, "NCCL_RAS_ADDR": address, "STAGER_JOB_DIR": "/other"}
    other = subprocess.Popen([sys.executable, program], env=env, stdout=subprocess.PIPE)
    sent: list[RankStates] = []
    try:
        assert other.stdout
        assert other.stdout.readline() == b"ready\n"
        with start_inspector(str(node.folder), node.list_pids, sent.append) as ask:
            for number in (*range(1, 6), UNASKED):
                ask(number)
            until(lambda: len(sent) == 6, 300)
    finally:
        other.kill()
        other.communicate()
    said = [event.nccl for event in sent]
    assert said[-1] == "", "ranks that are told to end are not held up"
    assert set(said[:-1]) <= {f"NCCL of {node.ranks[0].pid}\n", ""}
    assert sum(map(bool, said)) >= 3  # each is one of 8 attempts of which half meet the other job


@pytest.mark.parametrize("answer", ["", 'OK = b"HTTP"' + RAS])
def test_what_is_not_nccl_says_nothing(node: Node, answer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = unused_port() if answer else silent.getsockname()[1]  # as of a process that stands
        node.start(answer or "ready(); time.sleep(600)", NCCL_RAS_ADDR=f"127.0.0.1:{port}")
        assert ask_nccl(str(node.folder), node.ranks[0].pid) == ""
