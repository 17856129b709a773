"""The bundle file: manifest, archive and layers, read as input that may be hostile."""
