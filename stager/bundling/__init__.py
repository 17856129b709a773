"""The bundle file besides its layers: opening one, looking into it, its decompressor."""
