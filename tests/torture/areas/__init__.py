"""One file an area; each has ``AREA``."""
