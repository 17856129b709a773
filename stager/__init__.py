"""The login side: from a requirements file to one verified bundle, and the commands around it."""

__version__ = "0.1.0"
