"""What the documents show is run, or held against the code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import tomllib

from bundle.protocol.events import OF_AGENTS, OF_DRIVER
from stager.cli import app, load_commands
from stager.config.load import parse
from stager.core.store import Store
from tests.support.architecture import ORDER
from tests.support.building import Supplies
from tests.support.processes import Done, run
from tests.support.small_torch import TORCH
from tests.support.torch_project import REQUIREMENTS
from tests.support.wheelhouse import make_wheel

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text(encoding="utf-8")
SETTINGS = (REPO / "docs" / "settings.md").read_text(encoding="utf-8")
SLURM = (REPO / "docs" / "slurm.md").read_text(encoding="utf-8")
DOCUMENTS = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]
DOCUMENTS += sorted((REPO / "examples").rglob("*.md"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str, kind: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(text) if found == kind]


def commands(text: str, kind: str) -> list[list[str]]:
    """Every ``$ command`` of the blocks of a kind, without its comment."""
    lines = [line for block in blocks(text, kind) for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def test_the_readme_names_what_there_is() -> None:
    first = README.splitlines()[:30]
    for script in ("scripts/quickstart", "scripts/test"):
        assert any(line.startswith(f"$ {script}") for line in first)
        assert os.access(REPO / script, os.X_OK)
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    installs = re.findall(r"^\$ .*install '?\.(?:\[(\w+)\])?'?$", README, re.MULTILINE)
    assert installs
    assert {*installs} - {""} <= set(settings["project"]["optional-dependencies"])
    load_commands()
    shown = {str(one.name or one.callback.__name__) for one in app.registered_commands
             if not one.hidden}  # fmt: skip
    assert set(re.findall(r"^\| `stager ([\w-]+)` \|", README, re.MULTILINE)) == shown
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert {"docs/security.md", "SECURITY.md"} <= set(links)


def test_every_setting_is_in_the_page_and_in_the_file_of_init(tmp_path: Path) -> None:
    (block,) = blocks(SETTINGS, "toml")
    parse(tomllib.loads(block), root=tmp_path, source=tmp_path / "stager.toml")
    written = (REPO / "stager" / "config" / "template.toml").read_text(encoding="utf-8")
    settings = parse({"environment": {"requirements": []}}, root=tmp_path, source=tmp_path / "x")
    for setting in settings.settings:
        key = setting.key.partition(".")[2]
        assert re.search(rf"(?<![\w-]){key}(?![\w-])", block), setting.key
        assert re.search(rf"^(# )?{key} =", written, re.MULTILINE), setting.key


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert "://" in target or (path.parent / target).exists(), target


def test_the_pictures_are_described_small_and_of_no_machine() -> None:
    """``scripts/pictures.py`` makes them on somebody's machine."""
    found = dict(re.findall(r"!\[([^\]]+)\]\((docs/pictures/[^)]+)\)", README))
    assert sorted(found.values()) == ["docs/pictures/report.png", "docs/pictures/run.svg"]
    assert min(map(len, found)) > 40
    run, report = (REPO / "docs" / "pictures" / name for name in ("run.svg", "report.png"))
    assert run.stat().st_size < 60_000
    assert report.stat().st_size < 150_000
    shown = run.read_text(encoding="utf-8")
    assert "stager&#160;run" in shown
    assert not re.search(r"/root|/home|/var/|@import|@font-face|<script", shown)
    assert re.findall(r"https?://[^\s\"<]+", shown) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("side", ["bundle", "stager"])
def test_the_architecture_lists_the_packages_in_their_order(side: str) -> None:
    text = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = re.split(r"^### ", text, flags=re.MULTILINE)
    (table,) = (part for part in section if f"`{side}/`" in part.partition("\n")[0])
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert (*listed, "__main__") == ORDER[side]


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("stager", "bundle")
        for path in sorted((REPO / folder).rglob("*.py"))
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    text = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message \|.*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    rows = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    shown = [message for row in rows for message in row.split("`")[1::2]]
    assert len(shown) >= 15
    for message in shown:
        for part in re.split(r"\.\.\.|3\.x", message):
            assert part.strip() in joined, f"no message says {part.strip()!r}"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPO / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_events_is_that_of_their_classes() -> None:
    module = script("events")
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.page() == text, "run scripts/events.py"
    passed_on = {kind.event for kind in OF_DRIVER}
    passed_on |= {kind.event for kind in OF_AGENTS if kind not in module.FOR_THE_DRIVER}
    assert set(re.findall(r"^### `(.+)`$", text, re.M)) == passed_on


def test_the_page_of_failures_is_that_of_the_catalogue() -> None:
    module = script("troubleshooting")
    text = module.PAGE.read_text(encoding="utf-8")
    assert module.page(text) == text, "run scripts/troubleshooting.py"
    assert text.count("\n### ") >= 12


TRAIN = """\
import os, sys
import torch.distributed
print(f"[RANK {os.environ['RANK']}] WORLD_SIZE={os.environ['WORLD_SIZE']}", flush=True)
print("arguments:", sys.argv[1:], flush=True)
"""


@pytest.mark.usefixtures("index_env")
def test_the_session_runs_as_shown(wheelhouse: Path, supplies: Supplies, tmp_path: Path) -> None:
    """The commands of the README, in its order, in a project like the one it speaks of.

    Its packages are there by name: the same commands with the real ones have tests of their own.
    """
    supplies.put_into(Store(Path(os.environ["OFFLINE_ROOT"])))
    for requirement in REQUIREMENTS:
        name, _, version = requirement.partition("==")
        make_wheel(wheelhouse, name, version or "1.0", files=TORCH if name == "torch" else None)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "requirements.txt").write_text("\n".join(REQUIREMENTS) + "\n")
    (folder / "train.py").write_text(TRAIN)
    env = dict(os.environ)
    ran = []
    for command in commands(README, "console"):
        if command[0] != "stager":
            continue
        done = _run(command, folder, env)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        ran.append(command[1])
        if command[1] == "init":
            # Else an index of PyTorch's own is asked for it, too.
            settings = (folder / "stager.toml").read_text()
            assert '"requirements.txt"' in settings
            here = settings.replace("[environment]\n", '[environment]\ntorch-backend = "none"\n', 1)
            (folder / "stager.toml").write_text(here)
        if "--json" in command:
            assert json.loads(done.stdout)["layers_built"] == 0
        if command[1] == "run":
            assert "[RANK 0] WORLD_SIZE=4" in done.stdout
            assert "arguments: ['--epochs', '3']" in done.stdout
        if command[1] == "exec":
            assert done.stdout.startswith("2.13.0")
    shown = ["init", "build", "verify", "run", "build", "build", "build", "exec"]
    assert ran == [*shown, "diagnose", "logs", "report", "support"]


@pytest.mark.parametrize("command", commands(SLURM, "text"), ids=shlex.join)
def test_the_sample_session_uses_real_options(command: list[str]) -> None:
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    done = _run([*command[:2], "--help"], REPO, env)
    assert done.returncode == 0
    own = command[: command.index("--")] if "--" in command else command
    for option in (word for word in own if word.startswith("--")):
        assert option in done.stdout


def _run(command: list[str], folder: Path, env: Mapping[str, str]) -> Done:
    program = str(Path(sys.executable).with_name(command[0]))
    return run([program, *command[1:]], cwd=folder, env=dict(env))


def _rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables about defences, without their heads."""
    rows = [row.strip("|").split(" | ") for row in text.splitlines() if row.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if row[-1].strip() != "test"]


def test_each_defence_names_tests_that_exist() -> None:
    text = (REPO / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [row for row in _rows(text) if len(row) == 3 and not set(row[0]) <= set("- ")]
    assert len(rows) >= 30
    for _, _, named in rows:
        if named == "-":
            continue
        found = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", named)
        assert len(found) == named.count("`") // 2 > 0, named
        for path, name in found:
            assert f"\ndef {name}(" in (REPO / path).read_text(encoding="utf-8"), f"{path}::{name}"
