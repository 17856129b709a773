"""Signatures of bundles: making one, and deciding whether one is accepted."""
