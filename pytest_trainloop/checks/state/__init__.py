"""Whether a run under one seed repeats itself."""
