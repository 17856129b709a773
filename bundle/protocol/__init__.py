"""The values both sides share: the job, problems, rates, and output as events."""
