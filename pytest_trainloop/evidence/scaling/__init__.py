"""Gradient scalers: the order of their calls, the trace of their scale, and runs at another scale."""
