"""Checks that fail because of the faults of this family."""

LEARNING = ("overfit_one_batch", "update_ratio")
"""A wrong gradient keeps a model from learning as it should."""
