"""The patches, each with the real fault; interpreters are those of real virtual environments."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.hooked_environment import make_environment, run_python, surroundings

REPO = Path(__file__).resolve().parents[3]
PACKAGE = REPO / "bundle" / "environment"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("plain") / "env").parents[2]


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("patches", sys.stdlib_module_names),
        # What nothing else has loaded by then would cost each interpreter of an environment.
        ("imports", {"__future__", "_thread", "collections", "gc", "importlib", "os", "sys",
                     "types", "typing"}),
    ],
)  # fmt: skip
def test_the_files_of_every_interpreter_stand_alone(name, imported):
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= set(imported)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module.partition(".")[0] in imported


def test_off_unless_asked_for_and_activation_imports_nothing_and_happens_once(env):
    code = "import sys; print('_stager_patches' in sys.modules, len(sys.meta_path))"
    without, empty = run_python(env, code), run_python(env, code, STAGER_PATCHES="")
    assert without.stdout == empty.stdout
    assert without.stdout.startswith("False")
    off = run_python(env, code, STAGER_PATCHES="0")
    assert off.stdout.split()[1] == without.stdout.split()[1]
    assert off.stderr == ""
    code = """
        import sys, _stager_patches
        _stager_patches.activate()
        _stager_patches.activate()
        print(sum(hasattr(finder, "finds_for_stager") for finder in sys.meta_path))
        print({"torch", "datasets", "numpy"} & set(sys.modules))
    """
    assert run_python(env, code, STAGER_PATCHES="all").stdout == "1\nset()\n"


def test_unknown_name_is_told_and_the_others_apply(env):
    code = "import sys; print(any(hasattr(f, 'finds_for_stager') for f in sys.meta_path))"
    done = run_python(env, code, STAGER_PATCHES="torch-cpu-set-device, numpy3")
    assert done.stdout == "True\n"
    assert done.stderr.startswith("patch failed: numpy3: no patch has this name")
    assert done.stderr.count("\n") == 1
    assert (
        "datasets-numpy2, hub-datasets, hub-files, hub-spaces, inductor-headers, inductor-keys, "
        "torch-cpu-set-device" in done.stderr
    )


# --- a table of the test's own: how a patch is applied --------------------------------------------

# Patches colorsys, a module of the standard library that nothing else imports.
OWN_TABLE = """
import importlib, inspect, sys, _stager_patches as patches

def mark(module):
    module.marked = True

def table(applies=lambda module: not hasattr(module, "marked"), apply=mark):
    link = "https://example.org/1"
    patches.PATCHES = (patches.Patch("own", "A reason.", link, "colorsys", applies, apply),)
    patches.activate()
"""


def own(env: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code after ``OWN_TABLE``, whose patches are all selected, once it is activated."""
    start = "import os; os.environ['STAGER_PATCHES'] = '1'\n"
    return run_python(env, start + OWN_TABLE + textwrap.dedent(code), **variables)


def test_patched_after_import_and_the_module_stays_itself(env):
    done = own(
        env,
        """
        table()
        import colorsys
        spec = colorsys.__spec__
        print(colorsys.marked, "exec_module" in vars(spec.loader), type(spec.loader).__name__)
        print("def rgb_to_hsv" in inspect.getsource(colorsys))
        del colorsys.marked
        print(importlib.reload(colorsys).marked)
        """,
    )
    assert done.stdout == "True False SourceFileLoader\nTrue\nTrue\n"
    assert done.stderr == "patch applied: own\n"


@pytest.mark.parametrize(
    "code",
    [
        "import colorsys; table()",
        "table(); import colorsys",
        # Libraries ask ``find_spec`` whether torch is there before anybody imports it.
        "table(); import importlib.util as u; u.find_spec('colorsys'); import colorsys",
        # A finder that asks all the others in turn.
        """
class Asking:
    def find_spec(self, name, path, target=None):
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        return next(filter(None, found), None)
table(); sys.meta_path.insert(1, Asking()); import colorsys""",
    ],
    ids=["before", "after", "looked-for", "asking"],
)
def test_the_module_is_patched_once_however_it_is_looked_for(env, code):
    done = own(env, f"{code}; print(colorsys.marked)")
    assert (done.stdout, done.stderr) == ("True\n", "patch applied: own\n")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("applies=lambda module: 1 / 0", "ZeroDivisionError: division by zero"),
        ("apply=lambda module: module.absent", "AttributeError: "),
        ("applies=lambda module: True", "RuntimeError: the fault is still there in "),
    ],
)
def test_patch_that_fails_leaves_the_import_alone(env, arguments, why):
    done = own(env, f"table({arguments})\nimport colorsys\nprint(colorsys.rgb_to_hsv(0, 0, 0))")
    assert done.stdout == "(0.0, 0.0, 0)\n"
    assert done.stderr.startswith(f"patch failed: own: {why}")
    assert done.stderr.count("\n") == 1


def test_import_that_fails_fails_as_before(env, tmp_path):
    (tmp_path / "colorsys.py").write_text("raise ValueError('broken')")
    done = own(env, f"sys.path.insert(0, {str(tmp_path)!r})\ntable()\nimport colorsys")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: broken\n")
    assert "patch" not in done.stderr.splitlines()[-1]


# --- torch-cpu-set-device -------------------------------------------------------------------------


def old_torch(root: Path, *, cuda: str = "None", set_device: str = "") -> str:
    """Write a stand-in for a torch before 2.2, whose CPU builds no index carries any longer."""
    package = root / "torch"
    (package / "cpu").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import cpu, version\n")
    (package / "version.py").write_text(f"cuda = {cuda}\nhip = None\n")
    (package / "cpu" / "__init__.py").write_text(set_device)
    return str(root)


SET_DEVICE = "import torch; print(torch.cpu.set_device('cpu'))"


def test_torch_without_set_device(env, tmp_path):
    torch = old_torch(tmp_path)
    assert "AttributeError" in run_python(env, SET_DEVICE, PYTHONPATH=torch).stderr
    done = run_python(env, SET_DEVICE, PYTHONPATH=torch, STAGER_PATCHES="1")
    assert (done.stdout, done.stderr) == ("None\n", "patch applied: torch-cpu-set-device\n")
    other = run_python(env, SET_DEVICE, PYTHONPATH=torch, STAGER_PATCHES="datasets-numpy2")
    assert "AttributeError" in other.stderr


def test_torch_built_for_cuda_is_patched_only_without_a_gpu(env, tmp_path):
    torch = old_torch(tmp_path, cuda="'12.1'")
    # Which device files there are differs between the machines that run this test.
    here = "import _stager_patches as patches; patches.GPU_NODES = ('/dev/absent', '{}'); "
    with_gpu, without = (here.format(file) + SET_DEVICE for file in (os.devnull, "/dev/none"))
    on = {"PYTHONPATH": torch, "STAGER_PATCHES": "1"}
    assert run_python(env, without, **on).stdout == "None\n"
    assert "AttributeError" in run_python(env, with_gpu, **on).stderr
    assert run_python(env, with_gpu, **on, CUDA_VISIBLE_DEVICES="").stdout == "None\n"
    assert "AttributeError" in run_python(env, with_gpu, **on, CUDA_VISIBLE_DEVICES="0").stderr


# --- one line a node ------------------------------------------------------------------------------


def test_processes_of_one_job_say_it_once(env, tmp_path):
    torch, job = old_torch(tmp_path), tmp_path / "job"
    job.mkdir()
    variables = surroundings(PYTHONPATH=torch, STAGER_PATCHES="1", STAGER_JOB_DIR=str(job))
    argv = [env / "bin" / "python", "-c", SET_DEVICE]
    started = [subprocess.Popen(argv, env=variables, **PIPES) for _ in range(8)]
    ended = [process.communicate(timeout=300) for process in started]
    assert [stdout for stdout, _ in ended] == ["None\n"] * 8
    assert "".join(stderr for _, stderr in ended) == "patch applied: torch-cpu-set-device\n"
    assert [path.name for path in job.iterdir()] == ["patch.torch-cpu-set-device"]


def test_without_a_job_directory_children_do_not_repeat_it(env, tmp_path):
    torch = old_torch(tmp_path)
    code = f"{SET_DEVICE}; import subprocess, sys; subprocess.run([sys.executable, '-c', {{}}])"
    nested = code.format(repr(SET_DEVICE))
    for job in ({}, {"STAGER_JOB_DIR": str(tmp_path / "absent")}):
        done = run_python(env, nested, PYTHONPATH=torch, STAGER_PATCHES="1", **job)
        assert done.stdout.count("None") == 2
        assert done.stderr == "patch applied: torch-cpu-set-device\n"


# --- datasets-numpy2 ------------------------------------------------------------------------------

# In the parent, in a spawned child, and in the workers of map(); each takes rows in NumPy format.
TRAIN = """
import multiprocessing, os
import numpy
from datasets import Dataset

ROWS = {"a": [1, 2, 3, 4], "l": [[1, 2], [3], [], [4]], "x": [0.5, None, 1.5, 2.0]}

def load():
    return Dataset.from_dict({**ROWS, "s": ["p", "q", None, "r"]}).with_format("numpy")

def spawned():
    print("child", load()[1]["l"].tolist())

def doubled(row):
    return {"double": row["a"] * 2, "pid": os.getpid()}

if __name__ == "__main__":
    rows = load()
    print("parent", rows[0]["l"].tolist(), rows["a"].dtype, type(rows[:2]["l"]).__name__)
    print("objects", [item.tolist() for item in rows["l"]], rows["s"].tolist())
    child = multiprocessing.get_context("spawn").Process(target=spawned)
    child.start()
    child.join()
    mapped = rows.map(doubled, num_proc=2)
    pids = set(mapped["pid"].tolist()) | {os.getpid()}
    print("map", mapped["double"].tolist(), len(pids), child.exitcode)
"""
SHOWN = """\
parent [1, 2] int64 ndarray
objects [[1, 2], [3], [], [4]] ['p', 'q', None, 'r']
child [3]
map [2, 4, 6, 8] 3 0
"""


@pytest.fixture(scope="module")
def numpy_2(tmp_path_factory):
    root = tmp_path_factory.mktemp("numpy2") / "env"
    return make_environment(root, "datasets==2.19.0", "numpy>=2", "pyarrow>=16.1").parents[2]


@pytest.mark.network
@pytest.mark.slow
def test_datasets_with_numpy_2_works_in_every_process(numpy_2, tmp_path):
    """Three ranks under the wrapper, as the launcher would start them; the last on another node."""
    ranks = []
    for rank, node in enumerate(tmp_path / name for name in ("node1", "node1", "node2")):
        for name in ("job", "project", f"home{rank}"):
            (node / name).mkdir(parents=True, exist_ok=True)
        (node / "project" / "train.py").write_text(TRAIN)
        wrapper = node / "job" / "run_wrapper.py"
        shutil.copy(REPO / "bundle" / "launch" / "wrapper.py", wrapper)
        variables = surroundings(
            STAGER_ENV=str(numpy_2),
            STAGER_PROJECT=str(node / "project"),
            STAGER_JOB_DIR=str(node / "job"),
            RANK=str(rank),
            HF_HOME=str(node / f"home{rank}"),
            HF_DATASETS_OFFLINE="1",
            HF_DATASETS_DISABLE_PROGRESS_BARS="1",
        )
        argv = [numpy_2 / "bin" / "python", wrapper, "train.py"]
        ranks.append(subprocess.Popen(argv, env=variables, cwd=node, **PIPES))
    ended = [rank.communicate(timeout=300) for rank in ranks]
    assert [stdout for stdout, _ in ended] == [SHOWN] * 3, ended
    lines = [[line for line in said.splitlines() if line.startswith("patch ")] for _, said in ended]
    assert lines[0] + lines[1] == lines[2] == ["patch applied: datasets-numpy2"]


# --- inductor-keys --------------------------------------------------------------------------------

PRINT_KEY = """
import pathlib
from torch._inductor import codecache
from torch._inductor.codecache import get_hash
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
options = CppTorchDeviceOptions(device_type="cpu")
key = get_hash("int x;", CppBuilder(name="o", sources="i", BuildOption=options).get_command_line())
print(key)
if hasattr(codecache.code_hash, "patched"):
    path = pathlib.Path(codecache.get_path(key, "main.so")[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert codecache._HEADER_DIR.endswith("/compiled/kind/.headers"), codecache._HEADER_DIR
    print(codecache._precompile_header("vector"))  # raises TypeError if it is to be compiled
"""


@pytest.mark.full
@pytest.mark.slow
def test_compiled_code_has_the_same_key_in_every_environment(env, tmp_path):
    found = importlib.util.find_spec("torch")
    if found is None:
        pytest.skip("torch is not installed")

    def print_key(root, name, code="compiled/kind"):
        environment = tmp_path / root / "envs" / name
        environment.mkdir(parents=True)
        packages = environment / "pkgs"
        packages.symlink_to(Path(found.origin).parents[1])
        return run_python(
            env,
            PRINT_KEY,
            PYTHONPATH=str(packages),
            STAGER_ENV=str(environment),
            STAGER_PATCHES="1",
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / root / code / "inductor"),
        )

    ran = [print_key(*place) for place in (("here", "one"), ("here", "two"), ("there", "one"))]
    assert len({one.stdout for one in ran}) == 1
    key, header = ran[0].stdout.split()
    assert (len(key) > 30, header) == (True, "vector")
    applied = ["patch applied: inductor-headers", "patch applied: inductor-keys"]
    assert [sorted(one.stderr.splitlines()) for one in ran] == [applied] * 3
    # A precompiled header's key holds the paths of the headers: they are found by this link.
    link, torch = tmp_path / "here/compiled/kind/.torch", tmp_path / "here/envs/two/pkgs/torch"
    assert os.readlink(link) == str(torch)
    own = [print_key("mine", name, "my-own-cache") for name in ("one", "two")]
    assert [one.stderr for one in own] == ["", ""]
    assert own[0].stdout != own[1].stdout
