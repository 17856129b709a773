"""The far side: all that happens inside an allocation.

Standard library only, relative imports only, Python 3.9 or newer. The package travels verbatim in
every bundle as ``node.pyz`` and is run as ``python3 -I -S node.pyz COMMAND``.
"""
