"""The processes of a job on this machine."""

from __future__ import annotations

import os

from tests.support.building import Project
from tests.support.processes import command_lines


def find_node_programs(project: Project, role: str) -> list[int]:
    """The drivers (``drive``) or agents (``agent``) of a project's job, by the program they run."""
    store = os.fsencode(project.store.root)
    split = ((number, line.split(b"\0")) for number, line in command_lines())
    return [
        number
        for number, words in split
        if role.encode() in words and any(word.startswith(store) for word in words)
    ]
