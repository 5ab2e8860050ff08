"""A loop with activation checkpointing against the same loop without it."""
