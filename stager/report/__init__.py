"""A job as one HTML page."""
