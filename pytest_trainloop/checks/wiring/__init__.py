"""Whether every parameter is held, reached and stepped, in the right order and mode."""
