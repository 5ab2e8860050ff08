"""Textbook forms of losses, and the search for one that a loop's own calls compute."""
