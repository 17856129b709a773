"""Faults injected into the real product, and the promises that each must keep.

``python -m tests.torture`` plays rounds; ``registry`` names the areas, ``areas/`` holds one file
for each, ``isolation`` gives a round its own directory, mounts and processes, ``world`` what it
begins with, ``product`` runs commands and judges what they say. See ``docs/reliability.md``.
"""
