"""``stager inspect`` on the command line: what may be combined, and where a document may go."""

from __future__ import annotations

import json
from pathlib import Path

from stager.pack.members import copy_to
from tests.support.building import Project


def test_a_document_is_no_part_of_the_project(project: Project, tmp_path: Path) -> None:
    """Else it would be of another bundle than the one that it comes with."""
    built = project.build()
    bundle = str(built.packed.path)
    done = project.stager("inspect", "--sbom", "-o", "bill.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "let its name end in .cdx.json" in done.stderr
    assert not (project.root / "bill.json").exists()

    done = project.expect("inspect", "--sbom", "-o", "bill.cdx.json")
    file = project.root / "bill.cdx.json"
    assert done.stdout == f"{file}\n"
    assert "came from" not in done.stderr
    assert json.loads(file.read_text())["bomFormat"] == "CycloneDX"
    assert project.build().packed.manifest.id == built.packed.manifest.id

    printed = project.stager("inspect", "--sbom", bundle)
    assert printed.stdout == file.read_text()
    elsewhere = tmp_path / "carried.pkgs.tar"
    copy_to(built.packed.path, elsewhere)
    (project.root / "stager.toml").unlink()
    done = project.expect("inspect", "--sbom", str(elsewhere), "-o", "bill.json")
    assert "says where alpha and 1 more came from (2 of 2 packages)" in done.stderr
    nowhere = ("-o", "no/such/folder.cdx.json", bundle)
    done = project.expect("inspect", "--sbom", *nowhere, code=1)
    assert "cannot be written: No such file or directory" in done.stderr
    done = project.expect("inspect", "--licenses", bundle)
    assert "components without a licence:" in done.stdout
