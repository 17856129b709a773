"""The commit of a package that comes from a git repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bundle.protocol.digest import Digest, canonical_json

from .indexes import strip_credentials


@dataclass(frozen=True, kw_only=True)
class GitPin:
    """The commit of a package that comes from a git repository."""

    name: str
    """The package."""
    url: str
    """The repository, without credentials."""
    revision: str
    """The branch or tag that was asked for; empty for the repository's default."""
    commit: str
    """The commit it stood for."""
    subdirectory: str = ""
    """The folder of the package in the repository; empty for the top."""

    @property
    def requirement(self) -> str:
        """Return the requirement that takes this very commit."""
        return f"{self.name} @ {self.label}"

    @property
    def label(self) -> str:
        """Return the place of this very commit, without credentials."""
        return f"git+{self.url}@{self.commit}{self.fragment}"

    @property
    def fragment(self) -> str:
        """Return the end of a URL that names the folder; empty for the top."""
        return f"#subdirectory={self.subdirectory}" if self.subdirectory else ""

    @property
    def digest(self) -> Digest:
        """Return the digest that the wheel of this very commit is kept under."""
        return Digest.of(canonical_json([self.url, self.commit, self.subdirectory]))

    def is_of(self, other: GitPin) -> bool:
        """Return whether both pin the same package of the same branch."""
        return self._asked == other._asked

    @property
    def _asked(self) -> tuple[str, ...]:
        return self.name, self.url, self.revision, self.subdirectory


def git_pin(package: Mapping[str, Any]) -> GitPin:
    """Return the pin of a package in a lock (PEP 751) that comes from version control."""
    vcs = package["vcs"]
    return GitPin(
        name=str(package["name"]),
        url=strip_credentials(str(vcs.get("url", ""))),
        revision=str(vcs.get("requested-revision", "")),
        commit=str(vcs.get("commit-id", "")),
        subdirectory=str(vcs.get("subdirectory", "")),
    )
