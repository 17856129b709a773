"""Carrying a bundle by hand to where there is no network: into a file, and out of it again."""
