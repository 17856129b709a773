"""The wheels of a lock, fetched into the offline root."""
