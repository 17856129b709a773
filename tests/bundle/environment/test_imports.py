"""Imports in which the collector waits, in interpreters of real virtual environments."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bundle.environment.imports import PATIENCE
from tests.support.hooked_environment import make_environment, run_python
from tests.support.interpreters import OTHERS

PACKAGE = Path(__file__).resolve().parents[3] / "bundle" / "environment"
SHOWS = "import gc; print(__name__, gc.get_threshold())\n"
ITSELF = "(700, 10, 10)"
PATIENT = f"({PATIENCE}, 10, 10)"
START = "import gc; gc.set_threshold(700, 10, 10)\n"
"""What Python begins with differs by its version."""


def python(env: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    project = env / "project"
    project.mkdir(exist_ok=True)
    (project / "mine.py").write_text(SHOWS + "import plain\n")
    return run_python(env, START + textwrap.dedent(code), project, **variables)


def lines(env: Path, code: str, **variables: str) -> list[str]:
    done = python(env, code, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


MODULES = {
    **dict.fromkeys(("plain", "outer/inner", "outer/lazy", "outer/__main__", "last"), SHOWS),
    "outer/__init__": SHOWS + "from . import inner\nimport plain\nprint('outer ends')\n",
    "old": "import warnings\nwarnings.warn('of old', DeprecationWarning, stacklevel=2)\n",
    "asks": "import sys\nprint(sys._getframe(1).f_code.co_filename)\n",
    "forks": "import gc, os\nif not os.fork():\n    print(gc.get_threshold(), flush=True)\n"
    "    os._exit(0)\nos.wait()\n",
    "slow": "import time\nopen('begun', 'w').close()\ntime.sleep(1)\n",
    "strict": SHOWS + "gc.set_threshold(123, 4, 5)\n",
    "broken": SHOWS + "raise ValueError('no luck')\n",
    "large": "import gc\nkept = [[] for _ in range(50_000)]\nloop = []\nloop.append(loop)\n",
    "torch/__init__": SHOWS + "class version: cuda = None\n",
    "torch/cpu": SHOWS,
}
"""Packages that show how they are imported."""


@pytest.fixture(scope="module", params=[sys.executable, *OTHERS])
def env(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain") / "env"
    packages = make_environment(root, python=request.param)
    for name, text in MODULES.items():
        path = packages / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


def test_the_collector_waits_for_a_package_and_all_that_it_imports(env: Path) -> None:
    """Under each of its names; a project, which may train while it is imported, is as ever."""
    said = lines(env, "import outer; print(gc.get_threshold()); import outer.lazy, plain")
    waited = [f"{name} {PATIENT}" for name in ("outer", "outer.inner", "plain")]
    assert said == [*waited, "outer ends", ITSELF, f"outer.lazy {PATIENT}"]
    for place in (env / "pkgs", env / (env / "pkgs").readlink()):
        code = f"import sys; sys.path[:] = [{str(place)!r}]; import plain"
        assert lines(env, code) == [f"plain {PATIENT}"]
    assert lines(env, "import mine") == [f"mine {ITSELF}", f"plain {PATIENT}"]
    assert lines(env, "import colorsys; print(gc.get_threshold())") == [ITSELF]


def test_what_a_package_or_a_program_wants_stays(env: Path) -> None:
    assert lines(env, "import strict; print(gc.get_threshold())")[1] == "(123, 4, 5)"
    assert lines(env, "gc.set_threshold(0); import plain") == ["plain (0, 10, 10)"]
    many = f"({PATIENCE * 2}, 10, 10)"
    assert lines(env, f"gc.set_threshold({PATIENCE * 2}); import plain") == [f"plain {many}"]
    assert lines(env, "gc.disable(); import plain; print(gc.isenabled())")[1] == "False"
    assert lines(env, "import outer", STAGER_IMPORTS="0")[0] == f"outer {ITSELF}"


def test_nothing_is_loaded_for_it(env: Path) -> None:
    loaded = "import sys; print(sorted(set(sys.modules) - {'_stager_imports', '__future__'}))"
    assert lines(env, loaded) == lines(env, loaded, STAGER_IMPORTS="0")


def test_an_import_that_fails(env: Path) -> None:
    code = """
        import traceback
        try:
            import broken
        except ValueError:
            traceback.print_exc()
        print(gc.get_threshold())
        import plain
    """
    done = python(env, code)
    assert done.stdout.splitlines()[1:] == [ITSELF, f"plain {PATIENT}"]
    assert done.stderr.rstrip().endswith("ValueError: no luck")
    missing = python(env, "import plain.there_is_none")
    assert "'plain' is not a package" in missing.stderr
    assert "_stager_imports" not in missing.stderr


def test_many_objects_are_old_at_once_and_freed_as_ever(env: Path) -> None:
    code = """
        frozen = gc.get_freeze_count()
        import large
        print(gc.get_count()[0] < 5_000, gc.get_freeze_count() <= frozen)
        del large.loop
        print(gc.collect() > 0)
        gc.freeze()
        frozen = gc.get_freeze_count()
        __import__("importlib").reload(large)
        print(frozen > 50_000, frozen - gc.get_freeze_count() < 55_000)
    """
    assert lines(env, code) == ["True True", "True", "True True"]


def test_other_threads_go_on_importing(env: Path) -> None:
    code = """
        import threading
        def work():
            import outer.inner, mine
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        import strict, large, outer.lazy
        for thread in threads: thread.join()
        gc.set_threshold(700, 10, 10)
        import last
        print(gc.get_threshold())
    """
    assert lines(env, code)[-2:] == [f"last {PATIENT}", ITSELF]


def test_a_child_that_is_forked_meanwhile_is_as_ever(env: Path) -> None:
    assert lines(env, "import forks; print(gc.get_threshold())") == [ITSELF, ITSELF]
    code = """
        import os, threading, time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        thread = threading.Thread(target=__import__, args=("slow",))
        thread.start()
        while not os.path.exists("begun"): time.sleep(0.01)
        if not os.fork():
            import plain
            print(gc.get_threshold(), flush=True)
            os._exit(0)
        os.wait()
        thread.join()
        os.remove("begun")
        print(gc.get_threshold())
    """
    assert lines(env, code) == [f"plain {PATIENT}", ITSELF, ITSELF]


def test_warnings_and_tracebacks_name_who_imports(env: Path) -> None:
    """As they do without it; Python passes over its own frames of an import only."""
    for code in ("import old", "import asks", "import broken"):
        with_it, without = (python(env, code, STAGER_IMPORTS=word) for word in ("1", "0"))
        assert with_it.stderr == without.stderr
        if code != "import broken":
            assert with_it.stdout == without.stdout
    assert "DeprecationWarning: of old" in python(env, "import old").stderr


def test_finders_that_come_later_are_asked(env: Path) -> None:
    code = """
        import sys
        from importlib.machinery import PathFinder
        class Blocks:
            def find_spec(self, name, path, target=None):
                if name == "plain": raise ModuleNotFoundError("blocked")
        class Counts:
            asked = 0
            def find_spec(self, name, path, target=None): self.asked += 1
        counts = Counts()
        sys.meta_path.insert(sys.meta_path.index(PathFinder), Blocks())
        sys.meta_path.append(counts)
        try:
            import plain
        except ModuleNotFoundError as error:
            print(error)
        try:
            import there_is_none
        except ModuleNotFoundError:
            print(counts.asked)
        import strict
        sys.meta_path.clear()
        try:
            import last
        except ModuleNotFoundError:
            print("none left")
    """
    assert lines(env, code) == ["blocked", "1", f"strict {PATIENT}", "none left"]


def test_it_looks_as_ever_to_whoever_looks(env: Path) -> None:
    code = """
        import importlib, importlib.metadata, importlib.resources, importlib.util, inspect, pkgutil
        import runpy, sys, _stager_imports
        _stager_imports.activate()
        print(sum(hasattr(finder, "waits_for_stager") for finder in sys.meta_path))
        import outer.lazy
        print(type(outer.__loader__).__name__, "exec_module" in vars(outer.__loader__))
        print(inspect.getsource(outer.lazy).startswith("import gc"))
        print([found.name for found in pkgutil.iter_modules(outer.__path__)])
        print(importlib.util.find_spec("plain").origin.endswith("plain.py"))
        print(pkgutil.get_data("outer", "lazy.py")[:9].strip())
        importlib.invalidate_caches()
        print(list(importlib.metadata.distributions()))
        runpy.run_module("outer", run_name="__main__", alter_sys=True)
    """
    names = "['__main__', 'inner', 'lazy']"
    seen = ["1", *lines(env, "import outer.lazy"), "SourceFileLoader False", "True"]
    assert lines(env, code) == [
        *seen, names, "True", "b'import gc'", "[]", f"__main__ {ITSELF}"
    ]  # fmt: skip


def test_patches_come_after_the_import(env: Path) -> None:
    done = python(env, "import torch; print(torch.cpu.set_device(1))", STAGER_PATCHES="1")
    assert done.stderr == "patch applied: torch-cpu-set-device\n"
    assert done.stdout.splitlines() == [f"torch {PATIENT}", f"torch.cpu {PATIENT}", "None"]
