"""A job: prepared from settings, driven or submitted, and its result."""
