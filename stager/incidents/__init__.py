"""Nodes that misbehave: what failed on which node, kept in the offline root, listed and avoided."""
