"""A module that a rank did not find: what the bundle and the project's folder tell of it."""

from __future__ import annotations

import json
from pathlib import Path

from bundle.protocol.enumerations import FailureClass
from stager.diagnosis import diagnosis
from stager.diagnosis.failure import FirstFailure
from stager.logs.job_files import kept_job
from tests.support.building import Project
from tests.support.jobs import job_for


def test_the_remedy_is_that_of_this_project(project: Project, tmp_path: Path) -> None:
    for path in ("lib/tools.py", "src/own/__init__.py", "left_out/__init__.py", "train.py"):
        (project.root / path).parent.mkdir(parents=True, exist_ok=True)
        (project.root / path).touch()
    packed = project.settings("alpha", more='[project]\nexclude = ["left_out/"]').build().packed
    job = kept_job(
        json.dumps(job_for(packed, tmp_path, run_dir=str(project.root)).to_json()).encode()
    )

    def said(module: str) -> tuple[str, str]:
        first = FirstFailure(
            node="n1",
            kind=FailureClass.MISSING_MODULE,
            cause=f"ModuleNotFoundError: No module named '{module}'",
            hint="",
            entry="module-missing",
        )
        told = diagnosis.explain_missing_module(first, job)
        return told.meaning, told.hint

    meaning, hint = said("tools")
    assert meaning.startswith("the project has tools in lib, where Python does not look")
    assert hint.startswith("import it as lib.tools; or move lib/tools.py to")
    meaning, hint = said("left_out")
    assert meaning == f"left_out/ is in {project.root}, but not in the bundle"
    assert 'add "!/left_out/" to project.exclude' in hint
    assert said("sklearn.metrics") == (
        "no package in the bundle has the module sklearn, nor has the project",
        "add scikit-learn to environment.requirements in stager.toml, then `stager build`",
    )
    assert said("einops")[1] == (
        "add einops to environment.requirements in stager.toml (if the package of einops has "
        "another name, that one), then `stager build`"
    )
    assert said("alpha.absent")[0] == (
        "alpha is in the bundle in version 1.0, which has no module alpha.absent"
    )
    assert said("_lzma")[1].endswith('environment.interpreter = "bundled"')
    (project.root / "uv.lock").touch()
    assert said("sklearn")[1] == "`uv add scikit-learn`, then `stager build`"
    packed.path.unlink()
    assert said("sklearn") == ("", "")
