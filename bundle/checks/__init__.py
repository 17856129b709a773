"""Checks of a node: preflight, the probe, and the deep verification."""
