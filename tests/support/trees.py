"""Small trees of files, as projects and assets have them."""

from pathlib import Path

from stager.layers.tree import Tree


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"content of {Path(name).name}\n")


def paths(tree: Tree) -> list[str]:
    return [file.path for file in tree.files]
