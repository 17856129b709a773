"""What every package uses: errors, values, the offline root, subprocesses, digests."""
