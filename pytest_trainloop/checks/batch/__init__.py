"""Whether rows, padding, positions and micro-batches contribute as they should."""
