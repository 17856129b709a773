"""One archive of a job's evidence: its contents, without secrets."""

LOG_BYTES = 5_000_000  # bytes of a log that go in; of a longer one its beginning and its end
