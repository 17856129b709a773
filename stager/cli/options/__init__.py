"""Options that commands share, a file for each noun; `job` makes a job's options of them."""
