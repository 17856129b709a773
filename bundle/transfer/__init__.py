"""The way of layers to the nodes: the plan, its forecast, and staging on one node."""
