"""The Python that a bundle brings: found, its files and libraries, started in another place."""
