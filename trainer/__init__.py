"""Training jobs that ride along in every bundle: ``python -m trainer NAME``."""
