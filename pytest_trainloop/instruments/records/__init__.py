"""Questions asked of a Record: plain data in, plain data out, no torch."""
