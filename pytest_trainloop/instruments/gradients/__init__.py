"""Gradients as vectors: how two runs compare, and whether the loss depends on a parameter."""
