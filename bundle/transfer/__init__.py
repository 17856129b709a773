"""How layers reach the nodes: the plan, its forecast, and staging on one node."""
