"""The probe, in real virtual environments with real decoys around them."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundle.checks import probe
from bundle.driver.findings import format_probe_line
from bundle.node.machine import host_facts
from bundle.protocol.job import Requires
from bundle.protocol.messages import ProbeAnswer
from bundle.protocol.problem import ProblemCode
from tests.support.missing_libraries import library_of, without
from tests.support.needs import lacks
from tests.support.problems import worded

DEEP = """
import os

def fall(depth):
    return fall(depth - 1) if depth else os.kill(os.getpid(), 11)

fall(60)
"""
"""A module that crashes far below its import, as a library does; its stack is a long one."""
RANK_ENV = {"PATH": "/usr/bin:/bin", "PYTHONNOUSERSITE": "1"}


def site(env: Path) -> Path:
    return env / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def install(folder: Path, name: str, version: str, files: Mapping[str, str]) -> None:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/METADATA", f"{info}/RECORD"])
    for path, content in {**files, f"{info}/METADATA": metadata, f"{info}/RECORD": record}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare virtual environment; tests copy it, as it is relocatable by way of its links."""
    folder = tmp_path_factory.mktemp("template") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


@pytest.fixture
def env(template: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "env"
    subprocess.run(["cp", "-a", template, folder], check=True)
    install(site(folder), "torch", "2.3.1", {"torch/__init__.py": "", "torch/cuda.py": ""})
    files = {"toy_core.py": "x = 1", "spread/one/deep/__init__.py": "", "_toy.abi3.so": ""}
    install(site(folder), "toy-package", "1.0", files)
    (folder / "project" / "mine").mkdir(parents=True)
    (folder / "project" / "mine" / "__init__.py").touch()
    return folder


def ask(
    env: Path, packages: list[str], imports: list[str], deep: bool = False, **variables: str
) -> ProbeAnswer:
    rank_env = {**RANK_ENV, **variables}
    return probe.probe_environment(str(env), packages, imports, rank_env, deep, 30)


def problems(facts: ProbeAnswer) -> list[str]:
    return [str(problem) for problem in facts.problems]


def test_a_sound_environment(env: Path) -> None:
    imports = ["torch.cuda", "spread.one.deep", "mine", "json", "sys", "zlib"]
    facts = ask(env, ["Torch", "toy_package"], imports)
    assert problems(facts) == []
    assert facts.origin_ok is True
    assert facts.packages == {"Torch": "2.3.1", "toy_package": "1.0"}
    assert facts.python == ".".join(str(part) for part in sys.version_info[:3])
    assert facts.prefix == str(env)
    origins = facts.origins
    assert origins["torch"] == str(site(env) / "torch" / "__init__.py")
    assert origins["torch.cuda"] == str(site(env) / "torch" / "cuda.py")
    assert origins["_toy"] == str(site(env) / "_toy.abi3.so")
    assert origins["mine"] == str(env / "project" / "mine" / "__init__.py")


def test_a_quick_probe_imports_nothing_a_deep_one_does(env: Path) -> None:
    (site(env) / "torch" / "__init__.py").write_text("raise RuntimeError('no driver')")
    assert problems(ask(env, ["torch"], ["torch.cuda"])) == []
    said = problems(ask(env, ["torch"], ["torch.cuda", "spread.one.deep", "toy_core"], deep=True))
    assert len(said) == 1
    assert "torch.cuda: the module cannot be imported; RuntimeError: no driver" in said[0]


def test_all_that_is_missing_is_named(env: Path) -> None:
    (site(env) / "toy_core.py").unlink()
    said = problems(ask(env, ["torch", "toy-package", "absent"], ["torch.absent", "none.at.all"]))
    assert len(said) == 4
    assert "toy-package: the package is incomplete; there is no module toy_core" in said[0]
    assert "absent: the package is missing" in said[1]
    assert "torch.absent: the module is missing" in said[2]
    assert "none.at.all: the module is missing" in said[3]


@pytest.mark.parametrize("with_metadata", [True, False])
def test_a_decoy_on_pythonpath_is_found_out(env: Path, tmp_path: Path, with_metadata: bool) -> None:
    decoy = tmp_path / "decoy"
    install(decoy, "torch", "9.9", {"torch/__init__.py": "", "spread/one/deep/__init__.py": ""})
    if not with_metadata:
        shutil.rmtree(decoy / "torch-9.9.dist-info")
    facts = ask(env, ["torch"], ["torch"], PYTHONPATH=str(decoy))
    assert facts.origin_ok is False
    said = problems(facts)
    assert f"torch: the module does not come from the environment; found in {decoy}" in said[-1]
    assert len(said) == 1 + with_metadata
    for name in ("spread.one.deep", "spread"):
        assert ask(env, [], [name], PYTHONPATH=str(decoy)).origin_ok is False
    (site(env) / "edited.pth").write_text(f"{decoy}\n")  # or a link out of it
    (site(env) / "linked").symlink_to(decoy / "spread" / "one" / "deep")
    assert [ask(env, [], [name]).origin_ok for name in ("spread", "linked")] == [False, False]


def test_decoys_elsewhere_do_not_matter(env: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for folder in (home / ".local" / "lib" / version / "site-packages", env):
        install(folder, "torch", "9.9", {"torch/__init__.py": ""})
    facts = ask(env, ["torch"], ["torch"], HOME=str(home))
    assert (problems(facts), facts.packages) == ([], {"torch": "2.3.1"})


def test_site_packages_of_the_interpreter_are_not_the_standard_library(env: Path) -> None:
    config = env / "pyvenv.cfg"
    config.write_text(config.read_text().replace("= false", "= true"))
    facts = ask(env, [], ["pip"])
    if any("missing" in text for text in problems(facts)):
        lacks("pip", "there is none")
    assert facts.origin_ok is False


def test_what_modules_print_does_not_mix_with_the_answer(env: Path) -> None:
    """Nor does a thread that it leaves running hold the answer up."""
    noisy = "import os; print('{}'); os.write(1, b'noise'); os.system('echo more')\n"
    noisy += "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start()"
    (site(env) / "toy_core.py").write_text(noisy)
    assert problems(ask(env, ["torch"], ["toy_core"], deep=True)) == []


@pytest.mark.parametrize(
    ("code", "why", "fix"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV, importing toy_core", "again"),
        ("import os; os.kill(os.getpid(), 4)", "ended by SIGILL", "lacks instructions"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL", "out of memory"),
        (DEEP, "ended by SIGSEGV, importing toy_core, Fatal Python error: Segm", "again"),
    ],
)
def test_an_import_that_ends_the_interpreter(env: Path, code: str, why: str, fix: str) -> None:
    (site(env) / "toy_core.py").write_text(code)
    facts = ask(env, ["torch"], ["torch", "toy_core"], deep=True)
    (said,) = problems(facts)
    assert facts.origin_ok is False
    assert why in said
    assert fix in said


def test_an_import_that_leaves_or_hangs(env: Path) -> None:
    (site(env) / "toy_core.py").write_text("import sys; sys.exit('no licence')")
    assert "SystemExit: no licence" in problems(ask(env, [], ["toy_core"], deep=True))[0]
    (site(env) / "toy_core.py").write_text("import time; time.sleep(900)")
    for seconds in (2, 20, 200):  # as long as it takes until the interpreter has begun
        facts = probe.probe_environment(str(env), [], ["toy_core"], RANK_ENV, True, seconds)
        (problem,) = problems(facts)
        assert f"took more than {seconds} s" in problem
        if "importing" in problem:
            break
    assert f"took more than {seconds} s, importing toy_core" in problem


@pytest.fixture
def libffi(env: Path, tmp_path: Path) -> str:
    """The name of a library that the environment's Python needs, and does not find."""
    return lacking(env, library_of(sys.executable, "_ctypes"), tmp_path)


def lacking(env: Path, library: Path, scratch: Path) -> str:
    """Let an environment's Python run where a library is missing; return the library's name."""
    python = env / "bin" / "python"
    python.rename(python.with_name("real"))
    argv = [*without(library, scratch), str(python.with_name("real"))]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(argv)} "$@"\n')
    python.chmod(0o755)
    return library.name.partition(".so")[0]


def test_a_library_that_an_import_needs_is_a_problem(env: Path, libffi: str) -> None:
    (site(env) / "toy_core.py").write_text("import ctypes")
    (site(env) / "torch" / "__init__.py").write_text("try: import toy_core\nexcept ImportError: x")
    for deep in (False, True):
        facts = ask(env, ["torch"], ["torch", "toy_core", "spread"], deep=deep)
        (problem,) = facts.problems
        assert (problem.code, problem.where.partition(".so")[0]) == (
            ProblemCode.LIBRARY_UNUSABLE,
            libffi,
        )
        assert problem.what == "the node has no usable copy of this shared library"
        assert problem.why == (
            "cannot open shared object file: No such file or directory; "
            "needed by ctypes in the environment's Python, and by torch, toy_core"
        )
        assert "uv python install" in problem.fix
        assert (facts.warnings, facts.origin_ok) == ((), True)


def test_a_library_that_no_import_needs_is_a_warning(env: Path, libffi: str) -> None:
    (site(env) / "torch" / "__init__.py").write_text("raise RuntimeError('no driver')")
    (site(env) / "toy_core.py").write_text("try: import ctypes\nexcept ImportError: ctypes = None")
    facts = ask(env, ["torch"], ["torch", "toy_core"])
    assert problems(facts) == [], "a quick probe does not report what else fails"
    (warning,) = facts.warnings
    assert warning.where.startswith(f"{libffi}.so")
    assert warning.why.endswith(
        "; needed by ctypes in the environment's Python, and by no module of environment.imports"
    )
    said = problems(ask(env, ["torch"], ["torch", "toy_core"], deep=True))
    assert len(said) == 1
    assert "RuntimeError: no driver" in said[0]


@pytest.mark.parametrize(("module", "beside"), [("_ctypes", "libm.so.6"), ("binascii", "")])
def test_a_library_without_which_nothing_runs(
    env: Path, tmp_path: Path, module: str, beside: str
) -> None:
    """One that the program needs; and one that importlib.metadata needs, by way of zipfile."""
    library = library_of(sys.executable, module)
    lacking(env, (library.parent / beside).resolve() if beside else library, tmp_path)
    (problem,) = ask(env, [], []).problems
    assert problem.what == "the environment's Python does not run"
    assert re.search(r"\S+\.so\S*: cannot open shared object file", problem.why)
    assert problem.fix.startswith("if it names a shared library, install that on the node")


def test_an_environment_that_is_not_there_or_not_python(tmp_path: Path) -> None:
    facts = ask(tmp_path / "absent", [], [])
    assert "cannot be started (No such file or directory)" in problems(facts)[0]
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    assert "is not usable; it answered: hello" in problems(ask(tmp_path, [], []))[0]


# --- the line ------------------------------------------------------------------------------------


def test_the_line_of_a_node() -> None:
    def line(packages: dict[str, str | None], **changed: Any) -> str:
        facts = ProbeAnswer(node="hpc09", python="3.11.7", packages=packages)
        return format_probe_line(replace(facts, **changed))

    names = {"numpy": "1.26.4", "extra": "1", "datasets": "2.19.0", "transformers": "4.41.2"}
    assert line({**names, "torch": "2.3.1"}) == (
        "NODE hpc09 OK -> PY 3.11 torch 2.3.1 tfm 4.41.2 datasets 2.19.0 numpy 1.26.4"
    )
    assert line({"numpy": "2", "x": "1"}) == "NODE hpc09 OK -> PY 3.11 numpy 2"
    letters = dict.fromkeys("abcdefgh", "1")
    assert line({"z": None, **letters}) == "NODE hpc09 OK -> PY 3.11 a 1 b 1 c 1 d 1 e 1 f 1"
    assert line({}) == "NODE hpc09 OK -> PY 3.11"
    bad = worded("first", "torch", "", ""), worded("second", "a", "", "")
    assert line({}, problems=bad) == "NODE hpc09 FAILED -> torch: first"


# --- what a bundle requires ----------------------------------------------------------------------

HOST = replace(host_facts(), hostname="n1", machine="x86_64", libc="glibc", libc_version="2.28")


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        (("x86_64", "glibc", "2.28"), []),
        (("x86_64", "glibc", "2.5"), []),
        (("x86_64", "glibc", "2.31"), ["the bundle needs glibc 2.31 or newer, the node has 2.28"]),
        (
            ("x86_64", "glibc", "2.31", "numpy 2.4 (numpy/_x.so)"),
            ["numpy 2.4 (numpy/_x.so) needs glibc 2.31 or newer, the node has 2.28"],
        ),
        (("x86_64", "musl", "1.2"), ["is glibc 2.28, and the bundle's packages are for musl"]),
        (("aarch64", "glibc", "2.28"), ["is for aarch64, the node is x86_64"]),
        (("aarch64", "glibc", "2.39"), ["is for aarch64", "needs glibc 2.39"]),
    ],
)
def test_requirements(needs: tuple[str, ...], why: list[str]) -> None:
    found = probe.check_requires(Requires("3.11", *needs), HOST)
    assert {problem.where for problem in found} <= {"n1"}
    for problem, text in zip(found, why, strict=True):
        assert text in problem.why


def test_on_alpine_linux_the_reason_is_musl() -> None:
    """Not that no glibc is as old as its version, or that there is no version of glibc."""
    alpine = replace(HOST, libc="musl", libc_version="1.2.5")
    for version in ("0.0", "2.28"):
        (problem,) = probe.check_requires(Requires("3.11", "x86_64", "glibc", version), alpine)
        assert problem.what == "the bundle is for another C library"
        assert problem.why == "the node's is musl 1.2.5, and the bundle's packages are for glibc"
