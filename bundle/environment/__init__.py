"""An environment on a node: unpacked, linked, checked for damage, and removed."""
