"""How the ranks of one node are started and followed, and their results."""
