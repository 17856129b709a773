"""The layers of models and data sets: one for each repository at its commit.

In an environment they are a cache of the hub, in the layout of ``huggingface_hub``. A model's files
are blobs with links to them, so one that several models share is stored with the first of them, and
the others link to it. A data set's files lie in the snapshot itself: ``datasets`` 2.19 sees no
links there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from bundle.environment.hub_datasets import PART
from bundle.environment.listing import STATE
from bundle.launch.program_variables import HUB
from bundle.protocol.digest import Digest

from ..core.store import Store, remove
from ..core.values import Target
from ..hub.client import HubFiles, is_the_users
from ..hub.repositories import HubFile, LockedRepository
from ..layers.layer_build import is_stored
from ..layers.source import LayerSource, layer_id
from ..layers.tree import Tree, TreeFile, digest_of

_ASKED = (
    *("config.json", "generation_config.json", "modelcard.json", "adapter_config.json"),
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spm.model", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("feature_extractor_config.json", "audio_tokenizer_config.json", "image_processor.json"),
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    *("pytorch_model.bin.index.json", "adapter_model.safetensors", "adapter_model.bin"),
    *("custom_generate/generate.py", "modules.json", "config_sentence_transformers.json"),
)
"""Files that libraries ask for in each model. A cache notes which of them a repository does not
have; without the note a library fails offline where it would go on (``_CACHED_NO_EXIST`` in
``huggingface_hub/file_download.py``, ``cached_files`` in ``transformers/utils/hub.py``)."""
_LISTED = 20
"""Files that were left out which the origin of a layer names; it has a limit."""
_NOWHERE = Path("/nonexistent")
"""The source of a file that need not be read: its layer exists."""


@dataclass(kw_only=True)
class _Content:
    files: dict[str, tuple[HubFile | bytes, int]] = field(default_factory=dict)
    """Files of the hub, or small ones of our own, and their sizes, by their paths."""
    links: dict[str, str] = field(default_factory=dict)
    """Targets of links by their paths."""

    def own(self, path: str, text: str) -> None:
        self.files[path] = (text.encode(), len(text.encode()))

    def link(self, path: str, goal: str) -> None:
        self.links[path] = os.path.relpath(goal, str(PurePosixPath(path).parent))


def hub_sources(
    repositories: Sequence[LockedRepository], files: HubFiles, target: Target
) -> list[LayerSource]:
    """Return the sources of the layers of models and data sets.

    Files are only looked for, and fetched, where a layer does not exist yet.

    Raises:
        StagerError: a file cannot be had.
    """
    sources = []
    blobs: dict[Digest, str] = {}
    taken = {f"{r.request.folder}/refs/main" for r in repositories if not r.request.revision}
    for repository in repositories:
        content = _content(repository, blobs)
        for ref in _refs(repository):
            if ref not in taken or not repository.request.revision:
                content.own(ref, repository.commit)
                taken.add(ref)
        source = _source(repository, content)
        if not is_stored(files.store, layer_id(source, target)):
            source = _with_files(source, repository, content, files)
        sources.append(source)
    return sources


def forget_files(store: Store) -> None:
    """Remove what was fetched: the layers have it. A cache of the user's there stays."""
    if not is_the_users(store.hub, os.environ):
        remove(store.hub)


def _content(repository: LockedRepository, blobs: dict[Digest, str]) -> _Content:
    """Return the files of a snapshot; ``blobs`` collects the first path of each content."""
    content = _Content()
    request = repository.request
    snapshot = f"{request.folder}/snapshots/{repository.commit}"
    for file in repository.files:
        path = f"{snapshot}/{file.path}"
        if request.kind == "dataset":
            content.files[path] = (file, file.size)
            continue
        blob = f"{request.folder}/blobs/{file.sha256}"
        stored = blobs.setdefault(file.sha256, blob)
        if stored == blob:  # also of another revision: of equal files the first is written
            content.files[blob] = (file, file.size)
        else:
            content.link(blob, stored)
        content.link(path, blob)
    if repository.left_out:
        listed = "".join(f"{path}\n" for path in repository.left_out)
        content.own(f"{request.folder}/{PART}/{repository.commit}", listed)
    if request.kind == "model":
        there = {*(file.path for file in repository.files), *repository.left_out}
        for name in sorted(set(_ASKED) - there):
            content.own(f"{request.folder}/.no_exist/{repository.commit}/{name}", "")
    return content


def _refs(repository: LockedRepository) -> list[str]:
    """Return the paths of refs; ``main`` is one even if only another revision is in the cache."""
    request = repository.request
    names = {"main", request.revision or "main"} - {repository.commit}
    return [f"{request.folder}/refs/{name}" for name in sorted(names)]


def _source(repository: LockedRepository, content: _Content) -> LayerSource:
    request = repository.request
    paths = sorted(content.files)
    tree = Tree(
        files=tuple(
            TreeFile(path=path, source=_NOWHERE, mode=0o644, size=content.files[path][1])
            for path in paths
        ),
        links=tuple(sorted(content.links.items())),
        skipped=(),
    )
    digests = []
    for path in paths:
        file = content.files[path][0]
        digests.append(Digest.of(file) if isinstance(file, bytes) else file.sha256)
    return LayerSource(
        kind="asset",
        name=request.name,
        version=repository.commit[:12],
        digest=digest_of(tree, digests),
        tree=tree,
        prefix=f"{STATE}/{HUB}",
        size=tree.size,
        hub={
            "type": request.kind,
            "name": request.name,
            "commit": repository.commit,
            "licence": repository.licence,
            **_left_out(repository),
        },
    )


def _left_out(repository: LockedRepository) -> dict[str, object]:
    if not repository.left_out:
        return {}
    some = list(repository.left_out[:_LISTED])
    return {"left-out": len(repository.left_out), "left-out-files": some}


def _with_files(
    source: LayerSource, repository: LockedRepository, content: _Content, files: HubFiles
) -> LayerSource:
    tree = source.tree or Tree(files=(), links=(), skipped=())
    placed = []
    for file in tree.files:
        origin = content.files[file.path][0]
        if isinstance(origin, bytes):
            place = _written(files.store, origin)
        else:
            place = files.locked(repository, origin)
        placed.append(replace(file, source=place))
    return replace(source, tree=replace(tree, files=tuple(placed)))


def _written(store: Store, data: bytes) -> Path:
    path = store.hub / f"own-{Digest.of(data)[:16]}"
    path.write_bytes(data)
    return path
