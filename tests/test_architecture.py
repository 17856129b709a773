"""The arrows and the size guide, held; and each rule shown to catch what it is for."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import architecture as house
from tests.support.architecture import Module, parse
from tests.support.interpreters import OTHERS

REPO = Path(__file__).resolve().parents[1]
STAGER, BUNDLE, TRAINER = (house.load(REPO, name) for name in ("stager", "bundle", "trainer"))
ALL = [*STAGER, *BUNDLE, *TRAINER]
TESTS = house.load(REPO, "tests")
SCRIPTS = [
    parse(f"scripts.{file.stem}", file.read_text(), path=file.relative_to(REPO).as_posix())
    for file in sorted((REPO / "scripts").glob("*.py"))
]


@pytest.mark.parametrize(
    ("rule", "modules"),
    [
        pytest.param(house.wrong_arrows, ALL, id="arrows"),
        pytest.param(house.far_side_imports, BUNDLE, id="far-side-stdlib"),
        pytest.param(house.against_the_order, ALL, id="order"),
        pytest.param(house.circles, ALL, id="circles"),
        pytest.param(house.imports_between_tests, TESTS, id="tests"),
        pytest.param(house.classes_of_one_name, ALL, id="class-names"),
        pytest.param(house.starts_processes, [*STAGER, *BUNDLE], id="processes"),
        pytest.param(house.imports_pickle, ALL, id="pickle"),
        pytest.param(house.leaves_early, ALL, id="exits"),
    ],
)
def test_the_house_holds(rule: Callable[[list[Module]], list[str]], modules: list[Module]) -> None:
    assert rule(modules) == []


def test_the_far_side_is_python_3_9_syntax() -> None:
    assert house.unreadable_for(BUNDLE, (3, 9)) == []
    newer = "match x:\n    case 1:\n        pass\n"
    assert len(house.unreadable_for([parse("bundle.x", newer)], (3, 9))) == 1
    assert house.unreadable_for([parse("bundle.x", "x: 'int | None' = None\n")], (3, 9)) == []


# --- each module can be the first to be imported -------------------------------------------------


EACH = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    print(name, importlib.import_module(name).__file__)
"""


def import_each(python: str, place: Path, modules: list[Module], *flags: str) -> dict[str, str]:
    """Import all of them in one process; return the file of each by its name.

    Where no modules wait for each other, each could have been the first.
    """
    names = [module.name for module in modules]
    done = subprocess.run(
        [python, *flags, "-c", EACH, str(place), *names],
        capture_output=True,
        text=True,
        cwd=place if place.is_dir() else place.parent,
        check=False,
    )
    assert done.stderr == "", f"{python}: {done.stderr}"
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == names, "a module prints something"
    return dict(lines)


def test_each_module_imports() -> None:
    assert "stager.core.values" in {module.name for module in STAGER}
    assert "bundle.format.manifest" in {module.name for module in BUNDLE}
    import_each(sys.executable, REPO, [*STAGER, *BUNDLE])


@pytest.mark.parametrize("python", [sys.executable, OTHERS[0]])
def test_each_far_side_module_imports_from_a_zip(python: str, tmp_path: Path) -> None:
    """As it travels."""
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for module in BUNDLE:
            archive.writestr(module.path, module.text)
    files = import_each(python, path, BUNDLE, "-I", "-S")
    assert all(file.startswith(str(path)) for file in files.values())


# --- each rule catches what it is for ------------------------------------------------------------


def violations(rule: Callable[[list[Module]], list[str]], name: str, text: str) -> list[str]:
    others = [
        parse("bundle", "", is_package=True),
        parse("bundle.format", "", is_package=True),
        parse("bundle.format.manifest", "def read(): ...\n"),
        parse("stager", "", is_package=True),
        *(parse(f"stager.{name}", "", is_package=True) for name in house.ORDER["stager"]),
    ]
    return rule([*(m for m in others if m.side == name.partition(".")[0]), parse(name, text)])


BAD = [
    (house.wrong_arrows, "bundle.x", "import stager.core.processes"),
    (house.wrong_arrows, "bundle.x", "from trainer import loop"),
    (house.wrong_arrows, "trainer.x", "from bundle.format.manifest import read"),
    (house.wrong_arrows, "trainer.x", "def f():\n    import stager"),
    (house.wrong_arrows, "stager.x", "import trainer"),
    (house.wrong_arrows, "stager.x", "from rich.table import Table"),
    (house.wrong_arrows, "stager.x", "def f():\n    import typer"),
    (house.wrong_arrows, "stager.cli", "import torch.distributed"),
    (house.wrong_arrows, "stager.x", "import numpy"),
    (house.imports_between_tests, "tests.slurm.test_x", "from tests.stager.test_y import JOB"),
    (house.imports_between_tests, "tests.slurm.test_x", "from tests import conftest"),
    (house.far_side_imports, "bundle.x", "import packaging.tags"),
    (house.far_side_imports, "bundle.x", "from bundle.format.manifest import read"),
    (house.far_side_imports, "bundle.format.x", "from .absent import read"),
    (house.far_side_imports, "bundle.format.x", "from . import absent"),
    (house.far_side_imports, "bundle.format.x", "from .manifest import absent"),
    (house.far_side_imports, "bundle.format.x", "from ...stager import run"),
    (house.against_the_order, "stager.wheels.x", "from ..pack import bundle"),
    (house.against_the_order, "stager.wheels.x", "from .. import pack"),
    (house.against_the_order, "stager.wheels.x", "import stager.layers"),
    (house.against_the_order, "stager.core.x", "def f():\n    from ..cli import main"),
    (house.against_the_order, "stager.lock.x", "if TYPE_CHECKING:\n    from ..jobs import job"),
    (house.against_the_order, "stager.homeless.x", ""),
    (house.classes_of_one_name, "stager.x", "class A: ...\nclass A: ..."),
    (house.starts_processes, "stager.x", "import subprocess"),
    (house.starts_processes, "bundle.x", "def f():\n    from subprocess import run"),
    (house.starts_processes, "stager.x", "import os\nos.system('x')"),
    (house.starts_processes, "stager.x", "import os\nos.posix_spawn('x', [], {})"),
    (house.imports_pickle, "bundle.x", "import pickle"),
    (house.imports_pickle, "stager.x", "from cloudpickle import loads"),
    (house.leaves_early, "stager.x", "import sys\nsys.exit(1)"),
    (house.leaves_early, "stager.x", "raise SystemExit(1)"),
    (house.leaves_early, "stager.x", "exit()"),
    (house.leaves_early, "stager.x", "raise NotImplementedError"),
]


@pytest.mark.parametrize(("rule", "name", "text"), BAD)
def test_a_violation_is_caught(rule: Callable[..., list[str]], name: str, text: str) -> None:
    assert len(violations(rule, name, text)) == 1


GOOD = [
    (house.wrong_arrows, "stager.x", "from bundle.format.manifest import read\nfrom .y import A"),
    (house.wrong_arrows, "stager.cli_build", "import typer\nfrom rich.table import Table"),
    (house.wrong_arrows, "trainer.x", "import torch\nfrom .data import load"),
    (house.imports_between_tests, "tests.slurm.test_x", "from tests.support.jobs import LAUNCH"),
    (house.imports_between_tests, "tests.slurm.test_x", "from tests import support, torture"),
    (house.far_side_imports, "bundle.format.x", "import os.path\nfrom . import manifest"),
    (house.far_side_imports, "bundle.format.x", "from .manifest import read"),
    (house.against_the_order, "stager.pack.x", "from ..wheels import fetch\nfrom .. import core"),
    (house.against_the_order, "stager.lock.x", "from .spec import Spec"),
    (house.classes_of_one_name, "stager.x", "class A: ...\nclass _B: ...\nclass _B: ..."),
    (house.starts_processes, "bundle.system.processes", "import subprocess"),
    (house.leaves_early, "stager.__main__", "import sys\nsys.exit(main())"),
    (house.leaves_early, "bundle.x", "import sys\nif __name__ == '__main__':\n    sys.exit(0)"),
]


@pytest.mark.parametrize(("rule", "name", "text"), GOOD)
def test_what_is_allowed_is_not_reported(
    rule: Callable[..., list[str]], name: str, text: str
) -> None:
    assert violations(rule, name, text) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from .b import f", 1),
        ("from . import b", 1),
        ("class A:\n    from .b import f", 1),
        ("def f():\n    from .b import g", 0),
        ("if TYPE_CHECKING:\n    from .b import f", 0),
        ("from .c import f", 0),
    ],
)
def test_modules_that_wait_for_each_other_are_caught(text: str, found: int) -> None:
    """Through a package as well: importing what is in it imports the package first."""
    package = parse("stager.p", "from .a import f", is_package=True)
    pair = [parse("stager.p.a", text), parse("stager.p.b", "from .a import g"), package]
    assert len(house.circles(pair)) == found
    outside = [parse("stager.p.a", "from ..q import b"), parse("stager.q", "from .p.c import f")]
    assert len(house.circles([*outside, parse("stager.p.c", ""), package])) == 1


def test_relative_imports_are_made_absolute() -> None:
    text = "from . import a\nfrom .b import c\nfrom .. import d\nfrom ..e.f import g\n"
    inside = [one.module for one in house.imports(parse("p.q.r", text))]
    assert inside == ["p.q", "p.q.b", "p", "p.e.f"]
    package = [one.module for one in house.imports(parse("p.q", text, is_package=True))]
    assert package == ["p.q", "p.q.b", "p", "p.e.f"]
