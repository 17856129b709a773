"""A project's build, and the bundle that belongs to its current state."""
