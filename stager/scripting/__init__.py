"""The batch script's own text."""
