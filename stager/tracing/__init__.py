"""The files of an environment that a smoke test reads, and what could be left out of it."""
