"""Models and data sets of a hub: their names, what the lock keeps of them, and their files."""
