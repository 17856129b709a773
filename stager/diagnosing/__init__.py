"""What failed first: the catalogue of failures, what logs show of it, and how it is judged."""
