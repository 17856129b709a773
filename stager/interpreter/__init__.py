"""The Python that a bundle brings: finding it, what belongs to it, the proof that it can be moved."""
