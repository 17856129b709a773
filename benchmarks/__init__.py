"""The benchmark behind ``scripts/bench.py``: ours and other tools, side by side on one machine.

``rows`` says what is compared and which ratio is the target, ``verdicts`` whether it is met;
``peers`` and ``ours`` say which commands are run; ``building``, ``unpacking``, ``starting``,
``cluster``, ``relays`` and ``curve`` run them and take the time; ``report`` and ``chart`` show what
came of it.
"""
