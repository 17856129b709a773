"""A directory where a file of the store belongs is named, and never a traceback."""

from __future__ import annotations

import pytest

from tests.support.building import Project

PLACES = [
    "wheels/{wheel}",
    "layers/{layer}",
    "bundles/{bundle}",
    "seals/{bundle}.txt",
    "proofs/{proof}",
    "programs/{program}",
    "projects/{note}",
    "checked.json",
    ".lock",
    ".tmp.lock",
]


@pytest.fixture
def built(project: Project) -> dict[str, str]:
    """A build's files by what they are."""
    packed = project.build(prove=True).packed
    store = project.store
    (wheel,) = store.wheels.glob("alpha-*.whl")
    layer = next(layer.id for layer in packed.manifest.layers if layer.kind == "wheel")
    return {
        "wheel": wheel.name,
        "layer": store.layer(layer).name,
        "bundle": packed.path.name,
        "proof": next(store.proofs.iterdir()).name,
        "program": f"{packed.manifest.node.sha256}.pyz",
        "note": next(store.projects.iterdir()).name,
    }


@pytest.mark.full
def test_directories_where_files_belong(project: Project, built: dict[str, str]) -> None:
    store = project.store
    for place in PLACES:
        path = store.root / place.format(**built)
        kept = path.read_bytes() if path.is_file() else b""
        path.unlink(missing_ok=True)
        path.mkdir()
        (path / "inside").write_text("x")
        for name in ("proofs/*", "bundles/*.tar"):  # so that all of a build is done
            for other in store.root.glob(name):
                if other != path and other.is_file():
                    other.unlink()
        (project.root / "train.py").write_text(f"print({place!r})\n")
        for argv in (["build", "--offline"], ["exec", "--", "true"]):
            done = project.stager(*argv)
            assert "Traceback" not in done.stderr, (place, done.stderr)
            assert done.returncode in (0, 1), done.stderr
            if argv[0] == "build" and done.returncode:
                assert path.name in done.stderr.replace("\n", "").replace(" ", ""), done.stderr
                assert "hint: " in done.stderr
        (path / "inside").unlink()
        path.rmdir()
        path.write_bytes(kept)


def test_files_where_directories_belong(project: Project) -> None:
    project.build()
    store = project.store
    for name in ("tmp", "seals", "proofs"):
        folder = store.root / name
        if folder.is_dir():
            folder.rename(store.root / f"{name}.before")
        folder.write_text("x")
        done = project.stager("build", "--offline")
        assert "Traceback" not in done.stderr, (name, done.stderr)
        if done.returncode:
            assert str(folder).replace(" ", "") in done.stderr.replace("\n", "").replace(" ", "")
        if folder.is_file():
            assert folder.read_text() == "x"
            folder.unlink()
