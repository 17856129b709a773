"""A discrete-event model of a job's transfer and phases, for more nodes than one machine can hold.

``python -m benchmarks.model`` has the commands. What it computes is in ``docs/scale.md``.
"""
