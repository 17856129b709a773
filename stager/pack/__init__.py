"""The bundle file: layers, the node program and a decompressor; opened and proved."""
