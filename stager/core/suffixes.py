"""Endings of the names of files that stager writes; no project ships a file with one of them."""

from __future__ import annotations

BUNDLE_SUFFIX = ".pkgs.tar"
CARRIED_SUFFIX = ".carry.tar"
"""A bundle, or part of one, that is carried over an air gap."""
IMAGE_SUFFIX = ".env.sqsh"
"""An environment to mount."""
SBOM_SUFFIX = ".cdx.json"
"""A bundle's inventory as CycloneDX."""
