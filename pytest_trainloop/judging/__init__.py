"""Runs the checks of one loop in order of worth and turns what they say into results."""
