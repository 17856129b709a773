"""How results come home: what is asked for, the stream, and where it lands."""
