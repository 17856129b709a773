"""What is sent to each task of a step: no more than its agents need, and all of that."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

from bundle.channel import bootstrap
from bundle.driver.transports import agent_program
from bundle.environment.unpack import list_hook_files
from bundle.protocol.codec import encode
from bundle.protocol.messages import Incoming, RelayTask, RequestReader, StepMessage, UnpackRequest
from stager.pack.node_program import add_bytecode, make_node_program
from tests.support.jobs import PLAIN

REPO = Path(__file__).resolve().parents[4]
PROGRAM = make_node_program()


SENT = agent_program.agent_modules(PROGRAM)


def imported(path: str) -> set[str]:
    """The modules of ours that a module needs at any time: not for types only."""
    found = set()
    tree = ast.parse((REPO / path).read_text())
    for_types = {
        id(inner) for node in ast.walk(tree) if is_for_types(node) for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level or id(node) in for_types:
            continue
        base = (REPO / path).parents[node.level - 1].joinpath(*(node.module or "").split("."))
        named = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
        found |= {one.relative_to(REPO).as_posix() for one in named if one.exists()}
    return found


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def test_agents_import_nothing_that_they_are_not_sent() -> None:
    """At no time: what is missing would be missed on a node only."""
    assert {path: imported(path) - SENT.keys() for path in SENT} == {path: set() for path in SENT}


@functools.cache
def started(phase: str, *, compiled: bool = False) -> tuple[bytes, str]:
    """What a step is sent, and its bootstrap program."""
    made = agent_program.AgentProgram(add_bytecode(PROGRAM) if compiled else PROGRAM)
    asked = StepMessage(phase, {"job": PLAIN.to_json()}, {})
    return made.make_step_input(asked), made.bootstrap


def test_each_module_that_is_sent_imports_with_nothing_else_there(tmp_path: Path) -> None:
    head, _, rest = started("verify")[0].partition(b"\n")
    path = tmp_path / "agent.pyz"
    path.write_bytes(bootstrap.make_zip(zlib.decompress(rest[: int(head.split()[0])])))
    code = f"""
import importlib, sys, zipfile
sys.path.insert(0, {str(path)!r})
names = [name[:-3].replace("/", ".") for name in zipfile.ZipFile({str(path)!r}).namelist()]
for name in names[1:]:
    importlib.import_module(name.removesuffix(".__init__"))
print(len(names))
"""
    argv = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert int(done.stdout) > 50


def test_what_is_sent_of_a_compiled_program_is_the_same() -> None:
    assert started("run", compiled=True) == started("run")


def test_it_is_small() -> None:
    """Each node gets the program once a job, with the first step's start.

    One program for all phases: tables of who needs what saved a quarter of it, and each new module
    had to be entered there. Slurm passes the variables on along a tree.
    """
    assert len(started("run")[0]) < 165_000


def outline(source: bytes) -> tuple[str, list[int]]:
    """A module without texts that nothing uses, and the lines of its statements."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return ast.dump(tree), [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def test_every_module_that_is_sent_does_the_same_on_the_same_lines() -> None:
    odd = b'A = """\n# kept\n"""  # not kept\n"""A text."""\n"; ".join([])\nB = f"#{A}" + \'#\'\n'
    short = agent_program.blank_texts(odd)
    assert short == b'A = """\n# kept\n"""\n""\n"; ".join([])\nB = f"#{A}" + \'#\'\n'
    for path, sent in SENT.items():
        assert outline(sent) == outline((REPO / path).read_bytes()), path


def test_what_environments_hold_is_sent_as_it_is() -> None:
    """An environment has the same files, whether an agent has made it or the node program."""
    whole = [name for name, data in SENT.items() if data == (REPO / name).read_bytes()]
    copied = [path for path in list_hook_files("3.11") if path.endswith(".py")]
    names = [Path(path).name.removeprefix("_stager_") for path in copied]
    assert {f"bundle/environment/{name}" for name in names} <= set(whole)


def start(data: bytes, program: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Start an agent, on a node that the request does not know."""
    return subprocess.run(
        agent_program.make_start_command(
            [sys.executable], "tidy", ("-c", program, "agent", "tidy")
        ),
        input=data,
        capture_output=True,
        env={"PATH": os.defpath, "SLURMD_NODENAME": "n2", **env},
        check=False,
    )


def test_variables_carry_the_program_and_are_gone_when_it_runs() -> None:
    made = agent_program.AgentProgram(PROGRAM)
    variables = made.variables()
    assert len(variables) > 1
    assert all(len(f"{name}={value}") < 1 << 17 for name, value in variables.items())
    sent = made.make_step_input(StepMessage("tidy", {"job": PLAIN.to_json()}, {}), carried=True)
    assert len(sent) < 1500
    code = made.bootstrap.replace("return binascii", "print(*names); return binascii")
    code = code.replace("    status", "    print(names_left()); status")
    code = "import os\nnames_left = lambda: [n for n in os.environ if 'PROGRAM' in n]\n" + code
    done = start(sent, code, **variables)
    assert done.stdout.decode().splitlines() == [" ".join(sorted(variables)), "[]"]
    assert "ValueError: tuple.index(x): x not in tuple" in done.stderr.decode()  # the agent's own


def test_a_field_that_differs_in_one_place_travels_once_but_for_that() -> None:
    """The manifest of a part of a bundle is as long as all the rest."""
    requests: dict[str, UnpackRequest] = {}
    for rank, node in enumerate(PLAIN.nodes):
        task = RelayTask("ab" * 16, f"10.0.0.{rank + 1}")
        incoming = Incoming(f"/tmp/{node}/bundle.tar", "m" * 20_000, ("a", "b"), 10, task)
        requests[node] = UnpackRequest(
            PLAIN, node, rank, 1, "/tmp/root", "/usr/bin/python3", "", rank == 1, incoming
        )
    message = json.loads(json.dumps(encode(agent_program.factor_requests(requests))))
    assert json.dumps(message).count("m" * 20_000) == 1
    assert message["own"]["n0"] == {
        "checked": False,
        "incoming": {"target": "/tmp/n0/bundle.tar", "relay": {"address": "10.0.0.1"}},
    }
    for node, request in requests.items():
        assert RequestReader(node).first(message) == request
