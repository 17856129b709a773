"""The wheels that a bundle is made of: those of the project's lock, and the decompressor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ..core.errors import ResolveError, WheelError
from ..core.store import Store
from ..core.values import Wheel
from ..lock.pylock import Lock
from ..lock.spec import Spec
from ..pack.decompressor import decompressor_lock
from ..wheels import FetchSettings, FindElsewhere, fetch


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """The places that wheels are fetched from, and into."""

    spec: Spec
    """The requirements, with their indexes and the target."""
    store: Store
    """The offline root, whose lock must be held."""
    offline: bool
    """True if nothing may be fetched."""
    progress: Callable[[str], None]
    """Takes one line of progress at a time."""
    elsewhere: FindElsewhere = lambda file: None
    """Asked for wheels that are not in the offline root, before they are fetched."""

    def of_lock(self, lock: Lock) -> tuple[Wheel, ...]:
        """Return the wheel of each file of a lock.

        Raises:
            WheelError: see :func:`stager.wheels.fetch`.
            ResolveError: the same.
        """
        given = FetchSettings(
            indexes=self.spec.all_indexes,
            urls=self.spec.urls,
            builds=self.spec.builds,
            elsewhere=self.elsewhere,
        )
        return fetch(lock, self.store, offline=self.offline, progress=self.progress, given=given)

    def decompressor(self, bundled_python: bool) -> Wheel | None:
        """Return what bundles are decompressed with; None where the nodes' Python can do that.

        The project's own indexes are asked first: where they are all there is, those of pip's
        configuration would be waited for in vain. The digest is pinned, whatever index has it.

        Raises:
            WheelError: it cannot be had.
            ResolveError: no index can be reached, or there is none for the target.
        """
        lock = decompressor_lock(self.spec.target, bundled_python=bundled_python)
        if lock is None:
            return None
        indexes = self.spec.all_indexes.without_credentials()
        if indexes != lock.indexes:
            with suppress(WheelError, ResolveError):
                return self.of_lock(replace(lock, indexes=indexes))[0]
        try:
            return self.of_lock(lock)[0]
        except WheelError as exc:
            (file,) = lock.files
            raise WheelError(
                "the zstd decompressor that every bundle carries cannot be obtained",
                hint=f"put {file.filename} into {self.store.wheels}, "
                "or build once where an index has it",
                context=exc.context or (exc.message,),
            ) from exc
