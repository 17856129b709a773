"""Removal of secrets and names from text that leaves the site."""
