"""How the driver and an agent talk: frames, lines, and an agent's side of it."""
