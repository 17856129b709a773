"""The time that staging takes: the history of earlier jobs, and the estimate."""
