"""Removal of what nothing uses any more from the offline root."""
