"""One layer from one source: wheels through ``installer``, bytecode, framing."""
