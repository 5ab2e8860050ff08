"""Bounds on rounding that several comparisons share, with their derivations."""

from __future__ import annotations

ROUNDING = 1e3
"""Machine epsilons within which two orders of summation agree.

The error of a sum of n terms is at most (n - 1) eps of the sum of their sizes, and about sqrt(n) eps of it where
roundings are independent (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2): 1e3 holds for a million
terms.
"""

CANCELLATION = 1e-5
"""Share of the largest gradient entry of a run below which a gradient is rounding.

A sum that cancels exactly (a bias before a batch norm, or before a softmax over keys) leaves a few machine epsilons of
its terms: up to about 1e2 * 1.2e-7 in float32.
"""

RESEEDED = 1_000_003
"""Added to the seed of ``fit`` in a run that shows which differences come from random numbers."""
