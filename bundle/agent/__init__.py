"""One node's part of each phase."""
