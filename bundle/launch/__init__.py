"""The ranks of one node: starting and following them, and their results."""
