"""Reading and checking ``stager.toml``: tables, values, and every problem at once."""
