"""How long staging takes: the history of earlier jobs, and the estimate."""
