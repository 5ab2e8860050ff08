"""How many steps the runs on one fixed batch may make."""

OWN_STEPS = 300
"""The loop's own optimizer steps, at most; option ``steps`` of overfit_one_batch."""
