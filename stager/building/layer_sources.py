"""Wheels that are not in the offline root, as far as its bundles have their content.

A layer that a wheel of the lock would give is put into the store in the wheel's stead. That it was
made from that wheel nobody can check, so somebody has to vouch for the bundle.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bundle.environment.hub_datasets import PART
from bundle.environment.listing import STATE
from bundle.format.layer import LayerError, Origin, read_origin
from bundle.format.manifest import Layer, Manifest
from bundle.launch.program_variables import HUB
from bundle.protocol.counts import format_count
from bundle.protocol.digest import Digest
from bundle.protocol.problem import NodeError

from ..config.load import Config
from ..core.errors import BundleError, ResolveError, WheelError
from ..core.files import BUNDLE_SUFFIX
from ..core.store import Store
from ..core.values import LockedFile, Target, Wheel
from ..hub.client import HubFiles
from ..hub.repositories import HubFile, LockedRepository
from ..layers.bytecode import Compiler
from ..layers.layer_build import is_stored
from ..layers.prune import select_entries
from ..layers.source import LayerSource, layer_id
from ..layers.tree import Tree, TreeFile, digest_tree
from ..lock.pylock import find_earlier_lock
from ..lock.spec import Spec
from ..pack import bundle_file
from ..pack.members import CheckedMembers, MemberError, make_reader
from ..trust import decide_trust


class BundledWheels:
    """Layers of bundles in the offline root, by the wheels that they were made from."""

    def __init__(
        self,
        config: Config,
        spec: Spec,
        store: Store,
        compiler: Compiler | None,
        note: Callable[[str], None],
    ) -> None:
        """Read no bundle yet. The store's lock must be held."""
        self._config, self._spec, self._store, self._note = config, spec, store, note
        self._compiler = compiler
        self._found: dict[Digest, Wheel | None] = {}
        self._sources: dict[Digest, LayerSource] = {}

    def find(self, file: LockedFile) -> Wheel | None:
        """Return the wheel of a locked file whose layer is here; its path leads to no file."""
        if file.sha256 not in self._found:
            self._found[file.sha256] = self._find_decompressor(file) or self._find_layer(file)
        return self._found[file.sha256]

    def source(self, wheel: Wheel) -> LayerSource:
        """Return the source of the layer of a wheel, which is here itself or as that layer."""
        return self._sources.get(wheel.sha256) or LayerSource.from_wheel(wheel, self._spec.prune)

    def summary(self) -> list[str]:
        """Return a line on the packages whose wheels are not here; none where all are."""
        if not self._sources:
            return []
        many = format_count(len(self._sources), "package")
        return [f"{many} taken from bundles in {self._store.bundles}: the wheels are not here"]

    def take_assets(self, repositories: Sequence[LockedRepository]) -> None:
        """Put the layers of models and data sets of a lock into the store."""
        wanted = {("asset", one.request.name, one.commit[:12]) for one in repositories}
        for path, manifest, layer in self._find_layers(wanted):
            self._take(path, manifest, layer)

    def _find_layers(
        self, wanted: Collection[tuple[str, str, str]]
    ) -> Iterator[tuple[Path, Manifest, Layer]]:
        for path, manifest in self._bundles if wanted else ():
            for layer in manifest.layers:
                if (layer.kind, layer.name, layer.version) in wanted:
                    yield path, manifest, layer

    @functools.cached_property
    def _bundles(self) -> list[tuple[Path, Manifest]]:
        """Bundles built here, signed by an allowed signer, or approved at import."""
        known = []
        for path in sorted(self._store.bundles.glob(f"*{BUNDLE_SUFFIX}")):
            with contextlib.suppress(BundleError):  # damaged, of another format, not signed
                manifest = bundle_file.read_manifest(path)
                verdict, _ = decide_trust(self._config, self._store, path, manifest.id)
                is_signed = verdict is not None and verdict.is_accepted
                if is_signed or bundle_file.is_for_builds(self._store, path, manifest.id):
                    known.append((path, manifest))
        return known

    def _find_decompressor(self, file: LockedFile) -> Wheel | None:
        for path, manifest in self._bundles:
            part = manifest.decompressor
            if part is None or part.sha256 != file.sha256:
                continue
            with self._note_damage(path), bundle_file.open_bundle(path, manifest.id) as bundle:
                data = bundle.read_part(part)
                final = self._store.wheels / file.filename
                with self._store.publish(final) as partial:
                    partial.write_bytes(data)
                return _wheel(file, final, file.sha256, len(data))
        return None

    def _find_layer(self, file: LockedFile) -> Wheel | None:
        for path, manifest, layer in self._find_layers({("wheel", file.name, str(file.version))}):
            source = self._make_source(path, manifest, layer, file)
            if source and self._take(path, manifest, layer):
                self._sources[source.digest] = source
                final = self._store.wheels / _filename(file, manifest)
                return _wheel(file, final, source.digest, layer.size)
        return None

    def _make_source(
        self, path: Path, manifest: Manifest, layer: Layer, file: LockedFile
    ) -> LayerSource | None:
        """Return the source of a layer; None if this build would make another layer."""
        made_from: Origin | None = None
        with self._note_damage(path), bundle_file.open_bundle(path, manifest.id) as bundle:
            made_from = read_origin(bundle.head(layer))
        if made_from is None or not _is_made_from(made_from, path, file, self._spec):
            return None
        pruned = made_from.options.get("prune", {"words": []})
        words = pruned.get("words") if isinstance(pruned, dict) else None
        allowed = select_entries(self._spec.prune, file.name)
        if not isinstance(words, list) or any(word not in allowed for word in words):
            return None
        source = LayerSource(
            kind="wheel",
            name=layer.name,
            version=layer.version,
            digest=made_from.content,
            size=layer.size,
            prune=tuple(words),
            compiler=self._compiler,
        )
        return source if layer_id(source, self._spec.target) == layer.id else None

    def _take(self, path: Path, manifest: Manifest, layer: Layer) -> bool:
        """Copy a layer into the store; return False if the bundle is damaged."""
        if is_stored(self._store, layer.id):
            return True
        self._store.require_space(layer.size, "the layers")
        final = self._store.layer(layer.id)
        with self._note_damage(path), bundle_file.open_bundle(path, manifest.id) as bundle:
            members = CheckedMembers(bundle.manifest, files=True)
            with self._store.publish(final) as partial, partial.open("wb") as out:
                for name, _ in layer.members:
                    out.writelines(members.pieces(name, make_reader(bundle, name)))
            return True
        return False

    @contextlib.contextmanager
    def _note_damage(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (BundleError, LayerError, MemberError, NodeError) as exc:
            why = exc.message if isinstance(exc, BundleError) else str(exc)
            self._note(f"nothing is taken from {path.name}: {why}")


def _is_made_from(made_from: Origin, bundle: Path, file: LockedFile, spec: Spec) -> bool:
    """Compare a layer with a locked file; only the bundle's lock knows the sdist of a wheel."""
    if file.is_wheel:
        return made_from.content == file.sha256
    lock = find_earlier_lock(bundle_file.find_imported_lock(bundle), spec.target)
    return lock is not None and any(file.sha256 == other.sha256 for other in lock.files)


def _filename(file: LockedFile, manifest: Manifest) -> str:
    """Return a wheel's name; for an sdist's, with the bundle's C library in place of its tags."""
    if file.is_wheel:
        return file.filename
    needs = manifest.requires
    libc = {"glibc": "manylinux", "musl": "musllinux"}[needs.libc]
    version = needs.libc_version.replace(".", "_")
    platform = "any" if version == "0_0" else f"{libc}_{version}_{needs.machine}"
    return f"{file.name.replace('-', '_')}-{file.version}-py3-none-{platform}.whl"


def _wheel(file: LockedFile, path: Path, digest: Digest, size: int) -> Wheel:
    return Wheel(name=file.name, version=file.version, path=path, sha256=digest, size=size)


@contextlib.contextmanager
def advise_behind_air_gap(store: Store) -> Iterator[None]:
    """Say what helps behind an air gap, where packages cannot be had."""
    try:
        yield
    except (ResolveError, WheelError) as exc:
        if not any((store.root / "imports").glob("*")):
            raise
        hint = (
            f"{exc.hint}; the bundles that were imported here for builds have not all that this "
            "lock needs: import more of them with --for-builds, or carry the new packages here "
            "with `stager export --base ID` or `stager mirror` (docs/air-gap.md)"
        )
        raise type(exc)(exc.message, hint=hint, context=exc.context) from exc


# In an environment models and data sets are a cache in the layout of ``huggingface_hub``. A model's
# files are blobs with links to them, stored with the first model that has them. A data set's files
# are in the snapshot itself: ``datasets`` 2.19 sees no links there.
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
_LISTED = 20  # files that were left out which the origin of a layer names; it has a limit
_NOWHERE = Path("/nonexistent")  # the source of a file that need not be read: its layer exists
_Content = dict[str, HubFile | bytes]  # files of the hub, or small ones of our own, by their paths


def make_hub_sources(
    repositories: Sequence[LockedRepository], files: HubFiles, target: Target
) -> list[LayerSource]:
    """Return the sources of models and data sets; files are fetched only for missing layers."""
    sources = []
    blobs: dict[Digest, str] = {}
    taken = {f"{r.request.folder}/refs/main" for r in repositories if not r.request.revision}
    for repository in repositories:
        content, links = _list_content(repository, blobs)
        request = repository.request
        # ``main`` is a ref even if only another revision is in the cache.
        for name in sorted({"main", request.revision or "main"} - {repository.commit}):
            ref = f"{request.folder}/refs/{name}"
            if ref not in taken or not request.revision:
                content[ref] = repository.commit.encode()
                taken.add(ref)
        source = _make_hub_source(repository, content, links)
        if not is_stored(files.store, layer_id(source, target)):
            source = _place_files(source, repository, content, files)
        sources.append(source)
    return sources


def _list_content(
    repository: LockedRepository, blobs: dict[Digest, str]
) -> tuple[_Content, dict[str, str]]:
    """Return a snapshot's files, and the links in it; ``blobs`` has each content's first path."""
    content: _Content = {}
    goals: dict[str, str] = {}
    request = repository.request
    snapshot = f"{request.folder}/snapshots/{repository.commit}"
    for file in repository.files:
        path = f"{snapshot}/{file.path}"
        if request.kind == "dataset":
            content[path] = file
            continue
        blob = f"{request.folder}/blobs/{file.sha256}"
        stored = blobs.setdefault(file.sha256, blob)
        if stored == blob:  # also of another revision: of equal files the first is written
            content[blob] = file
        else:
            goals[blob] = stored
        goals[path] = blob
    if repository.left_out:
        listed = "".join(f"{path}\n" for path in repository.left_out)
        content[f"{request.folder}/{PART}/{repository.commit}"] = listed.encode()
    if request.kind == "model":
        there = {*(file.path for file in repository.files), *repository.left_out}
        for name in set(_ASKED) - there:
            content[f"{request.folder}/.no_exist/{repository.commit}/{name}"] = b""
    return content, {path: os.path.relpath(goal, Path(path).parent) for path, goal in goals.items()}


def _make_hub_source(
    repository: LockedRepository, content: _Content, links: Mapping[str, str]
) -> LayerSource:
    request = repository.request
    files, digests = [], []
    for path, file in sorted(content.items()):
        if isinstance(file, bytes):
            size, digest = len(file), Digest.of(file)
        else:
            size, digest = file.size, file.sha256
        files.append(TreeFile(path=path, source=_NOWHERE, mode=0o644, size=size))
        digests.append(digest)
    tree = Tree(files=tuple(files), links=tuple(sorted(links.items())))
    said: dict[str, object] = {
        "type": request.kind,
        "name": request.name,
        "commit": repository.commit,
        "licence": repository.licence,
    }
    if repository.left_out:
        listed = list(repository.left_out[:_LISTED])
        said |= {"left-out": len(repository.left_out), "left-out-files": listed}
    return LayerSource(
        kind="asset",
        name=request.name,
        version=repository.commit[:12],
        digest=digest_tree(tree, digests),
        tree=tree,
        prefix=f"{STATE}/{HUB}",
        size=tree.size,
        hub=said,
    )


def _place_files(
    source: LayerSource, repository: LockedRepository, content: _Content, files: HubFiles
) -> LayerSource:
    tree = source.tree or Tree()
    placed = []
    for file in tree.files:
        origin = content[file.path]
        if isinstance(origin, bytes):
            place = files.store.hub / f"own-{Digest.of(origin)[:16]}"
            place.write_bytes(origin)
        else:
            place = files.obtain_locked(repository, origin)
        placed.append(replace(file, source=place))
    return replace(source, tree=replace(tree, files=tuple(placed)))
