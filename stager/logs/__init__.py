"""The files a job leaves: events and logs, merged by time."""
