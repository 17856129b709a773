"""The files that a job leaves: which there are, whose they are, and when their lines were said."""
