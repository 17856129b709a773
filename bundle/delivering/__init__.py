"""How the bundle comes to the nodes: what is missing where, how long it takes, the sending."""
