"""The variables that tell a process which node it is on, and who has started it."""

from __future__ import annotations

from collections.abc import Mapping

NODE = "STAGER_NODE"
"""The name of a host that was reached over ``ssh``, as the user wrote it."""
_LAUNCH_HOST = "SLURM_LAUNCH_NODE_IPADDR"
"""The address of the host that has started a step, see srun(1)."""
_CONNECTION = "SSH_CONNECTION"
"""The client's address and port, then the server's, see ssh(1)."""


def node_name(env: Mapping[str, str]) -> str:
    """Return the name that the driver has for this node; empty outside of a step."""
    return env.get(NODE) or env.get("SLURMD_NODENAME", "")


def driver_host(env: Mapping[str, str]) -> str:
    """Return the address of the driver's host as this node sees it; empty if it is not known."""
    if NODE in env:
        return _of_connection(env, 0)
    return env.get(_LAUNCH_HOST, "")


def reached_address(env: Mapping[str, str]) -> str:
    """Return the address at which ``ssh`` has reached this host; empty if it has not."""
    return _of_connection(env, 2) if NODE in env else ""


def _of_connection(env: Mapping[str, str], position: int) -> str:
    words = env.get(_CONNECTION, "").split()
    return words[position] if len(words) == 4 else ""
