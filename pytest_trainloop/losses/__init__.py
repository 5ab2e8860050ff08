"""Calls of a criterion, and the search for the smallest failing one."""
