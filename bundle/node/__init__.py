"""One node as such: what it is, its node root, and what nobody uses there any more."""
