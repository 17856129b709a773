"""A job as one HTML page: what is known of it, drawn and told without a network or a script."""
