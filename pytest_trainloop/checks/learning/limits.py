"""How long the runs on one fixed batch may take."""

OWN_STEPS = 300
"""The loop's own optimizer steps, at most; option ``steps`` of overfit_one_batch."""

SECONDS = 60.0
"""What all runs that are not the loop's own may take together; option ``seconds``."""
