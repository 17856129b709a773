"""The wrapper, run as each rank runs it: a process of its own, in a real virtual environment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.hooked_environment import make_environment
from tests.support.interpreters import OTHERS

BUNDLE = Path(__file__).resolve().parents[3] / "bundle"


@dataclass(frozen=True)
class Node:
    """A job's surroundings on one node, and a way to run the wrapper in them."""

    env: Path
    project: Path
    job_dir: Path
    cwd: Path

    def write(self, name: str, source: str) -> Path:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def run(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``run_wrapper.py ARGV...``; a variable given as empty is not set."""
        wrapper = self.job_dir / "run_wrapper.py"
        shutil.copy(BUNDLE / "launch" / "wrapper.py", wrapper)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("STAGER", "PYTHON"))}
        variables = {
            **inherited,
            "STAGER_ENV": str(self.env),
            "STAGER_PROJECT": str(self.project),
            "STAGER_JOB_DIR": str(self.job_dir),
            "STAGER_NODE": "hpc07",
            "RANK": "3",
            "LOCAL_RANK": "1",
            **variables,
        }
        env = {name: value for name, value in variables.items() if value}
        argv = (self.env / "bin" / "python", wrapper, *argv)
        return subprocess.run(
            argv, cwd=self.cwd, env=env, capture_output=True, text=True, timeout=300, check=False
        )

    def run_source(self, source: str, *args: str) -> subprocess.CompletedProcess[str]:
        self.write("train.py", source)
        return self.run("train.py", *args)

    def record(self, rank: int = 3) -> dict:
        return json.loads((self.job_dir / "failures" / f"{rank}.json").read_text())


@pytest.fixture(scope="module")
def plain_env(tmp_path_factory):
    """A virtual environment with a link ``pkgs``, as a node has it."""
    root = tmp_path_factory.mktemp("plain") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=300)
    (packages,) = root.glob("lib/python3*/site-packages")
    (root / "pkgs").symlink_to(packages.relative_to(root))
    return root


@pytest.fixture
def node(plain_env, tmp_path):
    places = [tmp_path / name for name in ("project", "job", "cwd")]
    for place in places:
        place.mkdir()
    return Node(plain_env, *places)


def test_script_is_the_projects_and_sees_itself_as_python_would_show_it(node):
    done = node.run_source("import sys; print(__name__, __file__, sys.argv[1:])", "--epochs", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"__main__ {node.project}/train.py ['--epochs', '3']\n"
    assert not (node.job_dir / "failures").exists()
    (node.cwd / "train.py").write_text("print('cwd')")
    (node.job_dir / "failures").mkdir()
    (node.job_dir / "failures" / "3.json").write_text("{}")  # of an earlier attempt
    (node.cwd / "only_here.py").write_text("print('only in cwd')")
    assert node.run_source("print('project')").stdout == "project\n"
    assert node.run("only_here.py").stdout == "only in cwd\n"
    names = ("STAGER_ENV", "STAGER_PROJECT", "STAGER_JOB_DIR", "STAGER_NODE", "RANK", "LOCAL_RANK")
    for variables in ({}, dict.fromkeys(names, "")):
        done = node.run(str(node.cwd / "train.py"), **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "cwd\n", "")
    assert node.run("train.py", STAGER_PROJECT="").stdout == "cwd\n"
    assert not (node.job_dir / "failures" / "3.json").exists()


def test_a_missing_script_names_both_places_and_none_is_a_usage_error(node):
    done = node.run("tarin.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"{node.project}/tarin.py (the staged project)" in done.stderr
    assert f"{node.cwd}/tarin.py (the working directory)" in done.stderr
    assert (node.record()["exit_code"], node.record()["exception"]) == (2, "FileNotFoundError")

    absolute = node.run(str(node.project / "tarin.py"))
    assert absolute.returncode == 2
    assert absolute.stderr.count(f"{node.project}/tarin.py") == 2  # as named, and as looked for
    assert "neither" not in absolute.stderr
    for argv in ([], ["-m"]):
        done = node.run(*argv)
        assert done.returncode == 2
        assert done.stderr == "usage: run_wrapper.py [-m MODULE | SCRIPT] ARGS...\n"


def test_order_of_sys_path(node, tmp_path):
    trainer = tmp_path / "rides-along"
    decoys = tmp_path / "decoys"
    for directory in (trainer / "trainer", decoys):
        directory.mkdir(parents=True)
    (trainer / "trainer" / "__init__.py").write_text("ORIGIN = 'ours'")
    (decoys / "torch.py").write_text("ORIGIN = 'decoy'")
    packages = (node.env / "pkgs").resolve()
    (packages / "torch.py").write_text("ORIGIN = 'bundle'")
    node.write("beside/neighbour.py", "")
    node.write("helper.py", "")
    node.write("src/of_src_layout.py", "")
    node.write(
        "beside/train.py",
        """
        import sys
        import helper, neighbour, of_src_layout, torch, trainer
        print(torch.ORIGIN, trainer.ORIGIN)
        print(*sys.path, sep="\\n")
        """,
    )
    done = node.run("beside/train.py", PYTHONPATH=str(decoys), STAGER_TRAINER=str(trainer))
    (packages / "torch.py").unlink()
    assert done.stderr == ""
    origins, *path = done.stdout.splitlines()
    assert origins == "bundle ours"
    own = [f"{node.project}/beside", str(node.project), f"{node.project}/src"]
    assert path[:5] == [*own, str(packages), str(decoys)]
    node.write("src/__init__.py", "")  # now it is a package that is called so
    assert "No module named 'of_src_layout'" in node.run("beside/train.py").stderr
    assert path[-1] == str(trainer)
    assert str(node.job_dir) not in path
    assert len({os.path.realpath(entry) for entry in path}) == len(path)
    # A node root may be reached by a link, and the interpreter started by that name.
    link = tmp_path / "scratch"
    link.symlink_to(node.env.parent)
    linked = replace(node, env=link / node.env.name)
    path = linked.run_source("import sys; print(*sys.path, sep='\\n')").stdout.splitlines()
    assert [p for p in path if os.path.realpath(p) == str(packages)] == [path[1]]
    assert path[1].startswith(f"{linked.env}/")


def test_a_module_with_arguments_one_that_is_missing_and_one_that_cannot_be_imported(node):
    node.write("tool/__init__.py", "")
    tool = node.write(
        "tool/go.py", "import sys; print(__name__, __package__, __spec__.name, sys.argv)"
    )
    done = node.run("-m", "tool.go", "-m", "x")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"__main__ tool tool.go {[str(tool), '-m', 'x']}\n"
    for name in ("nowhere", "tool.nowhere", "tool"):
        done = node.run("-m", name)
        assert done.returncode == 2, name
        assert done.stderr.startswith(f"run_wrapper: cannot run -m {name}: ")
        assert done.stderr.count("\n") == 1
        assert str(node.project) in done.stderr
        assert "Error" in node.record()["exception"]
    node.write("tool/__init__.py", "import not_installed_anywhere")  # of the program itself
    done = node.run("-m", "tool.go")
    assert done.returncode == 1
    assert f'File "{node.project}/tool/__init__.py", line 1' in done.stderr
    assert node.record()["exception"] == "ModuleNotFoundError"


def test_exception_is_shown_and_recorded(node):
    script = node.write(
        "train.py",
        """
        def even(n):
            if n == 0:
                raise ValueError("bad batch")
            odd(n - 1)

        def odd(n):
            even(n - 1)

        even(60)
        """,
    )
    before = time.time()
    done = node.run("train.py")
    plain = subprocess.run(
        [node.env / "bin" / "python", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == plain.returncode == 1
    assert done.stderr == plain.stderr
    record = node.record()
    assert before <= record.pop("time") <= time.time()
    assert record.pop("pid") > 0
    lines = record.pop("lines")
    assert len(lines) == 40
    assert lines[-1] == "ValueError: bad batch"
    assert lines == done.stderr.splitlines()[-40:]
    variables = record.pop("variables")
    assert [frame["place"] for frame in variables] == [
        f"{script}:{number} {name}" for number, name in ((4, "even"), (8, "odd"), (5, "even"))
    ]
    assert variables[0]["values"] == [{"name": "n", "type": "int", "text": "0"}]
    assert record.pop("seeds").keys() <= {"PYTHONHASHSEED"}
    assert record == {
        "v": 1,
        "node": "hpc07",
        "rank": 3,
        "local_rank": 1,
        "exit_code": 1,
        "exception": "ValueError",
        "message": "bad batch",
        "step": {},
    }
    assert [path.name for path in (node.job_dir / "failures").iterdir()] == ["3.json"]


@pytest.mark.parametrize(
    ("statement", "status", "exception", "stderr"),
    [
        ("sys.exit()", 0, None, ""),
        ("sys.exit(0)", 0, None, ""),
        ("sys.exit(3)", 3, "SystemExit", ""),
        ("sys.exit(-1)", 255, "SystemExit", ""),
        ("sys.exit('no data')", 1, "SystemExit", "no data\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt", "Traceback"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "KeyboardInterrupt", "Traceback"),
    ],
)
def test_ways_to_end(node, statement, status, exception, stderr):
    done = node.run_source(f"import os, signal, sys\n{statement}\n")
    assert done.returncode == status
    assert done.stderr == stderr or (stderr and done.stderr.startswith(stderr))
    if exception is None:
        assert not (node.job_dir / "failures").exists()
    else:
        assert node.record()["exception"] == exception
        assert node.record()["exit_code"] == status


@pytest.mark.parametrize(
    ("handled", "exception"),
    [
        ("sys.exit(4)", "KeyError"),
        ("die(error)", "KeyError"),  # a function is given the exception
        ("raise Exit(3) from None", "KeyError"),  # as typer's, which its caller ends the program by
        ("sys.exit('no vocab')", "SystemExit"),  # words of its own
        ("train()", "SystemExit"),  # without the exception: it goes on, and ends for its own reason
    ],
)
def test_an_exit_is_told_from_the_error_it_followed_from(node, handled, exception):
    node.run_source(
        f"""
        import sys
        class Exit(RuntimeError): pass
        def die(error): sys.exit(4)
        def train(): sys.exit(4)
        def main():
            try:
                {{}}["vocab"]
            except KeyError as error:
                {handled}
        try:
            main()
        except Exit:
            sys.exit(4)
        """
    )
    record = node.record()
    assert record["exception"] == exception
    if exception == "KeyError":
        assert record["lines"][-1] == "KeyError: 'vocab'"
        assert any('train.py", line 8' in line for line in record["lines"])


def test_the_last_frame_of_own_code_is_kept_beside_a_librarys(node):
    """Of an error of the command line there is none: the lines that were printed take its place."""
    done = node.run_source(
        """
        import copy, threading
        value = threading.Lock()
        for _ in range(30):
            value = [value]
        copy.deepcopy(value)
        """
    )
    assert done.returncode == 1
    lines = node.record()["lines"]
    assert len(lines) == 40
    assert lines[0].endswith('train.py", line 6, in <module>')
    assert lines[1].strip() == "copy.deepcopy(value)"
    done = node.run_source(
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        parser.parse_args(["--epochs", "x"])
        """
    )
    record = node.record()
    assert (done.returncode, record["exception"], record["lines"]) == (2, "ArgumentError", [])


def test_an_error_is_shown_as_the_program_would_show_it(node):
    script = node.write("train.py", "x = 1\ny = = 2\n")
    done = node.run("train.py")
    assert done.returncode == 1
    assert f'File "{script}", line 2' in done.stderr
    assert "run_wrapper" not in done.stderr
    assert "runpy" not in done.stderr
    assert node.record()["exception"] == "SyntaxError"
    hook = "lambda kind, error, trace: print('hook:', error, trace.tb_lineno)"
    done = node.run_source(f"import sys\nsys.excepthook = {hook}\nraise ValueError('x')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "hook: x 3\n", "")


def test_forked_child_that_fails_is_not_the_rank(node):
    done = node.run_source(
        """
        import os
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "ValueError: in the child" in done.stderr
    assert not (node.job_dir / "failures").exists()


SPAWNING = """
    import multiprocessing, pickle, sys
    import helper

    class Sample:
        def __init__(self, value):
            self.value = value

    def square(sample):
        return Sample(helper.square(sample.value))

    def work(queue, samples):
        queue.put([square(sample).value for sample in samples])

    if __name__ == "__main__":
        assert pickle.loads(pickle.dumps(square)) is square
        assert pickle.loads(pickle.dumps(Sample(3))).value == 3
        context = multiprocessing.get_context(sys.argv[1])
        queue = context.Queue()
        process = context.Process(target=work, args=(queue, [Sample(2), Sample(3)]))
        process.start()
        print(queue.get(timeout=300))
        process.join()
        with context.Pool(2) as pool:
            print([sample.value for sample in pool.map(square, [Sample(4), Sample(5)])])
        sys.exit(process.exitcode)
"""


def test_multiprocessing_with_what_the_script_defines(node):
    node.write("helper.py", "def square(x): return x * x")
    done = node.run_source(SPAWNING, "forkserver")  # spawned ones: test_every_python
    assert (done.returncode, done.stdout, done.stderr) == (0, "[4, 9]\n[16, 25]\n", "")


@pytest.mark.parametrize("ending", ["", "raise ValueError('x')"], ids=["end", "error"])
def test_pool_that_works_on_after_the_end(node, ending):
    """A pool not waited for is pickling the script's functions while the interpreter ends."""
    done = node.run_source(
        f"""
        import multiprocessing, pathlib, sys
        from concurrent.futures import ProcessPoolExecutor

        def work(number):
            pathlib.Path(str(number)).touch()

        if __name__ == "__main__":
            pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            for number in range(12):
                pool.submit(work, number)
            {ending}
        """
    )
    assert sorted(int(path.name) for path in node.cwd.iterdir()) == list(range(12)), done.stderr


def test_patches_are_on_unless_told_otherwise(node):
    patches = (node.env / "pkgs").resolve() / "_stager_patches.py"
    patches.write_text("import os\ndef activate(): print(os.environ['STAGER_PATCHES'], flush=True)")
    node.write("train.py", "import os; print(os.environ['STAGER_PATCHES'])")
    try:
        assert node.run("train.py").stdout == "1\n1\n"
        assert node.run("train.py", STAGER_PATCHES="0").stdout == "0\n0\n"
    finally:
        patches.unlink()


@pytest.mark.parametrize("python", [sys.executable, *OTHERS])
def test_every_python(python, node, tmp_path):
    make_environment(tmp_path / "env", python=python)
    here = replace(node, env=tmp_path / "env")
    node.write("helper.py", "def square(x): return x * x")
    node.write("train.py", SPAWNING)
    done = here.run("train.py", "spawn")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[4, 9]\n[16, 25]\n", "")
    # A stand-in for an old torch: see test_patches.py.
    node.write("torch/__init__.py", "from . import cpu, version")
    node.write("torch/version.py", "cuda = None")
    node.write("torch/cpu.py", "")
    node.write("early.py", "import torch; torch.cpu.set_device(0)")
    done = here.run("early.py")
    assert (done.returncode, done.stderr) == (0, "patch applied: torch-cpu-set-device\n")
    node.write("broken.py", "def f():\n    raise ValueError('x')\nf()\n")
    done = here.run("broken.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[1] == f'  File "{node.project}/broken.py", line 3, in <module>'
    assert node.record()["lines"] == done.stderr.splitlines()


WRAPPER = BUNDLE / "launch" / "wrapper.py"
SCRIPT = """\
import sys
print("one", 2, [3])
print("four", file=sys.stderr)
print("five", end="")
print(" six")
print("bar\\rbar", end="", flush=True)
raise SystemExit("last")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_one_write_and_comes_at_once(tmp_path: Path, unbuffered: str) -> None:
    """Each write is a packet here; into a pipe, those of two ranks could alternate."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {"PATH": os.defpath, "PYTHONUNBUFFERED": unbuffered}
    argv = [sys.executable, str(WRAPPER), "script.py"]
    packets = []
    with ours, theirs:
        subprocess.run(argv, cwd=tmp_path, env=env, stdout=theirs, stderr=theirs, check=False)
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                packets.append(ours.recv(65536))
    written = [packet for packet in packets if packet]
    assert written == [b"one 2 [3]\n", b"four\n", b"five six\n", b"bar\rbar", b"last\n"]


# --- a pipe of its own ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """The pipes' directory with one pipe, for local rank 1, and our end of it."""
    (tmp_path / "output").mkdir()
    os.mkfifo(tmp_path / "output" / "1")
    handle = os.open(tmp_path / "output" / "1", os.O_RDWR | os.O_NONBLOCK)
    yield tmp_path / "output", handle
    os.close(handle)


def ranked(script: str, tmp_path: Path, output: object) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(script)
    env = {"PATH": os.defpath, "RANK": "5", "LOCAL_RANK": "1", "STAGER_OUTPUT_NONCE": "abc"}
    env["STAGER_OUTPUT"] = str(output)
    argv = [sys.executable, str(WRAPPER), "script.py"]
    return subprocess.run(
        argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def test_all_that_a_rank_writes_goes_into_its_pipe(
    tmp_path: Path, folder: tuple[Path, int]
) -> None:
    script = (
        "import os, subprocess, sys\n"
        "print('one')\nprint('two', file=sys.stderr)\n"
        "subprocess.run(['echo', 'three'])\nos.write(1, b'four\\n')\n"
        "raise ValueError('five')\n"
    )
    done = ranked(script, tmp_path, folder[0])
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    lines = os.read(folder[1], 65536).decode().rstrip().split("\n")
    assert lines[:5] == ["\x1erank 5 abc", "one", "two", "three", "four"]
    assert lines[-1] == "ValueError: five"


SEES_IT = """\
import multiprocessing, os, subprocess, sys
NAME = "STAGER_OUTPUT_NONCE"
def look(how):
    print(how, os.environ.get(NAME), os.getenv(NAME), flush=True)
if __name__ == "__main__":
    look("rank")
    for how in ("fork", "spawn", "forkserver"):
        child = multiprocessing.get_context(how).Process(target=look, args=(how,))
        child.start()
        child.join()
    subprocess.run(["/bin/sh", "-c", f"echo sh ${NAME} None None"])
"""


def test_the_program_and_its_children_do_not_get_the_nonce(
    tmp_path: Path, folder: tuple[Path, int]
) -> None:
    done = ranked(SEES_IT, tmp_path, folder[0])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.read(folder[1], 65536).decode().rstrip().split("\n") == [
        "\x1erank 5 abc",
        *(f"{how} None None" for how in ("rank", "fork", "spawn", "forkserver")),
        "sh None None",
    ]


@pytest.mark.parametrize("pipe", ["0", "1"])
def test_without_a_pipe_of_its_own_it_writes_where_it_always_would(
    tmp_path: Path, pipe: str
) -> None:
    """Or with one that nobody reads: opening it would wait for ever."""
    os.mkfifo(tmp_path / pipe)
    done = ranked("print('hello')", tmp_path, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_more_than_a_pipe_holds_waits_for_the_reader(
    tmp_path: Path, folder: tuple[Path, int]
) -> None:
    """The wrapper opens it without waiting; writing must wait all the same."""
    os.set_blocking(folder[1], True)
    expected, read = b"\x1erank 5 abc\n" + b"x" * 1_000_000 + b"\n", b""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ranked, "print('x' * 1_000_000)", tmp_path, folder[0])
        while len(read) < len(expected):
            read += os.read(folder[1], 1 << 16)
        done = running.result()
    assert (done.returncode, done.stderr, read) == (0, "", expected)
