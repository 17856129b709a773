"""The wire between the driver and an agent: frames, lines, and an agent's side of it."""
