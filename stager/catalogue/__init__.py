"""The catalogue of failures: the lines of logs it knows, and a prefilter for them."""
