"""Everything a person sees: talk on standard error, data on standard output."""
