"""One archive of a job's evidence: its contents, without secrets."""
