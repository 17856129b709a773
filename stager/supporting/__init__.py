"""One archive of a job's evidence: what goes in, without secrets, and how it is written."""
