"""One node: its facts, its Python, its node root with locks and removal."""
