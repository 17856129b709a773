"""Taking a bundle out of a carried file, with the bundle it is based on, into the offline root."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bundle.format.archive import END, BundleFile
from bundle.format.manifest import MANIFEST_NAME, Manifest
from bundle.protocol.counts import counted
from bundle.protocol.problem import NodeError

from ..config.load import Config
from ..core.errors import BundleError
from ..core.files import BUNDLE_SUFFIX, opened
from ..core.store import Store
from ..inventory.provenance import names_wheels
from ..pack import bundle_file
from ..pack.bundle import bundle_path
from ..pack.bundle_file import ChosenBundle, is_sealed, seal
from ..pack.members import InspectedSignature, MemberError, reader, write_member
from ..pack.node_program import compiled_program
from ..trust import decide, inspected_signature, signature_of
from .carried_file import LOCK_NAME, SIGNATURE_NAME, CarriedFile
from .exports import members_of


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """The result of ``stager import``."""

    bundle: Path
    """The bundle in the offline root."""
    id: str
    """Its id."""
    name: str
    """The project's name."""
    bytes: int
    """Its length."""
    layers: int
    """Number of layers that came with the file."""
    layers_here: int
    """Number of layers that were here."""
    lock: Path
    """The lock that the bundle was made from."""
    already_here: bool
    """True if the bundle itself was here; its lock and signature are those of the file now."""
    signature: InspectedSignature | None
    """Its signature; null if there is none."""
    project: Path | None = None
    """The folder that the project's code was written to; null if that was not asked for."""
    notes: tuple[str, ...] = ()
    """What a person should know before they build it there."""


def import_file(path: Path, config: Config, store: Store, *, asked: str = "") -> ImportResult:
    """Add the bundle of a carried file to the offline root. The store's lock must be held.

    Raises:
        BundleError: the file is damaged, cut short or another one; or the base is not here; or the
            bundle has not the signature that the settings require.
        SpaceError: there is no room.
        StagerError: the offline root cannot be written.
    """
    try:
        handle = opened(path)
    except OSError as exc:
        raise BundleError(
            f"{path} cannot be read: {exc.strerror or exc}", hint="name the exported file"
        ) from exc
    with handle:
        return _Import(path, handle, store, asked).take(config)


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


class _Import:
    def __init__(self, path: Path, handle: BinaryIO, store: Store, asked: str) -> None:
        self._store = store
        self._file = CarriedFile(path, handle)
        self._manifest: Manifest = self._file.manifest
        self._size = self._manifest.size
        if not self._manifest.id.startswith(asked):
            raise BundleError(
                f"{path} does not carry the bundle that was asked for: its id is "
                f"{self._manifest.id}, expected {asked}",
                hint="name the right file, or leave out --id",
            )

    def take(self, config: Config) -> ImportResult:
        manifest, store = self._manifest, self._store
        final = bundle_path(store, manifest)
        lock = bundle_file.imported_lock(final)
        here = is_sealed(store, final, manifest)
        beside = dict(self._file.parts())
        self._refuse_unsigned(config, beside.get(SIGNATURE_NAME))
        if not here:
            store.require_space(self._size, "the bundle")
        with store.publishing(lock) as partial:  # first: it tells an import from a build's bundle
            partial.write_bytes(beside[LOCK_NAME])
            if here:  # what is here stays as it is
                self._refuse_other_lock(ChosenBundle(path=final, id=manifest.id), partial)
        if not here:
            with _removed_on_failure(lock):
                self._write(final)
            with _removed_on_failure(lock), _removed_on_failure(final):
                self._refuse_other_lock(ChosenBundle(path=final, id=manifest.id), lock)
            seal(store, final, manifest)  # only now it counts as checked
        if SIGNATURE_NAME in beside:
            with store.publishing(signature_of(final)) as partial:
                partial.write_bytes(beside[SIGNATURE_NAME])
        bundle_file.remember_import(store, manifest.name, final)
        # As a build does: whoever may only read this offline root could not make them.
        compiled_program(bundle_file.node_program(final, store, manifest.id), store)
        left_out = set(self._file.label.left_out)
        layers = sum(layer.member not in left_out for layer in manifest.layers)
        return ImportResult(
            bundle=final,
            id=manifest.id,
            name=manifest.name,
            bytes=self._size,
            layers=layers,
            layers_here=len(manifest.layers) - layers,
            lock=lock,
            already_here=here,
            signature=inspected_signature(config, final, manifest.id),
        )

    def _refuse_unsigned(self, config: Config, signature: bytes | None) -> None:
        if config.trust.require:
            text = None if signature is None else signature.decode("ascii", "replace")
            what, place = f"the bundle in {self._file.path}", f"{SIGNATURE_NAME} in that file"
            decide(config, text, self._manifest.id, what=what, place=place)

    def _refuse_other_lock(self, chosen: ChosenBundle, lock: Path) -> None:
        """Refuse a lock that names other wheels than the bundle has: the id does not cover it."""
        if not names_wheels(chosen, lock):
            raise BundleError(
                f"{self._file.path}: the lock in it is not the one that its bundle was made from",
                hint="carry the file again; if it is as it was exported, export it once more",
            )

    def _write(self, final: Path) -> None:
        """Write the bundle, each byte of it checked on its way."""
        with contextlib.ExitStack() as opened_bundles:
            sources = self._sources(opened_bundles)
            with self._store.publishing(final) as partial, partial.open("wb") as out:
                for name, size in self._manifest.members():
                    write_member(out, name, size, self._pieces(name, size, sources))
                self._file.end()
                out.write(END)

    def _pieces(self, name: str, size: int, sources: Mapping[str, BundleFile]) -> Iterator[bytes]:
        if name == MANIFEST_NAME:
            return iter((self._manifest.to_bytes(),))
        if name not in sources:
            return self._file.pieces(name, size)
        return self._from_here(name, sources[name])

    def _from_here(self, name: str, source: BundleFile) -> Iterator[bytes]:
        try:
            yield from self._file.members.pieces(name, reader(source, name))
        except (MemberError, NodeError) as exc:
            why = exc.problem.why if isinstance(exc, NodeError) else str(exc)
            raise BundleError(
                f"{source.path}, which the carried file builds on, is damaged: {why}",
                hint="import a file that carries all of the bundle (`stager export` without --base "
                "and --since)",
            ) from exc

    def _sources(self, opened_bundles: contextlib.ExitStack) -> Mapping[str, BundleFile]:
        """Open the bundles that have the members left out of the file; BundleError if none has."""
        left_out = set(self._file.label.left_out)
        wanted = {member for member in members_of(self._manifest) if member[0] in left_out}
        sources: dict[str, BundleFile] = {}
        for path in sorted(self._store.bundles.glob(f"*{BUNDLE_SUFFIX}")):
            if not wanted:
                break
            with contextlib.suppress(BundleError):  # this one is damaged, or of another format
                bundle = opened_bundles.enter_context(bundle_file.opened(path))
                found = wanted & members_of(bundle.manifest)
                sources.update((name, bundle) for name, _, _ in found)
                wanted -= found
        if wanted or left_out - sources.keys():
            raise self._without_base(len(wanted))
        return sources

    def _without_base(self, missing: int) -> BundleError:
        label = self._file.label
        return BundleError(
            f"{self._file.path} carries only what is new since the bundle {label.base[:12]}, and "
            f"{counted(missing, 'part')} of that cannot be found in {self._store.root}",
            hint=f"import the file that carries {label.base[:12]} first, or export again on the "
            "other side without --base and --since",
        )
