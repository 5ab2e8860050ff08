"""Record one run of a training loop through torch's own hooks."""
