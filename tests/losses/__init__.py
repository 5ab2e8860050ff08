"""Losses as projects write them: pairs of a faulty and a repaired one in ``PAIRS``, odd but correct ones in ``ODD``."""

from .odd import ODD
from .pairs import PAIRS, LossPair

__all__ = ["ODD", "PAIRS", "LossPair"]
