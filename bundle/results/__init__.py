"""A job's outputs: packed on a node, received and published at home."""
