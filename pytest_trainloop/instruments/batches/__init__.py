"""The user's batch as data: rows, micro-batches, padding, valid targets."""
