"""The workloads: one page each."""
