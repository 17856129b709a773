"""Which of the user's own files travel: the project, its ignore rules, the assets."""
