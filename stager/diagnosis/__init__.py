"""The first failure of a job: its evidence, its cause, and what to do."""
