"""Adapters for training loops of public repositories, which are run from checkouts and not copied."""
