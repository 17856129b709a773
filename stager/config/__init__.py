"""``stager.toml``: its tables, the check of every value, and its template."""
