"""How the driver and the agents talk: pipes, whole lines, questions and answers."""
