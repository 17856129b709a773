"""Secrets on the far side: which names mean one, and their removal from text."""
