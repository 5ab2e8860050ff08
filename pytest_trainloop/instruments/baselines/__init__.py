"""Baselines: the trajectory of a loop, recorded once, and its file. Nothing is judged here."""
