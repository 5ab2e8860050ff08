"""Calls of a criterion, and the search for the smallest one that violates a property."""
