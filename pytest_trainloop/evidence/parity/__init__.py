"""A loop in low precision, against itself in float64 (RULINGS R5)."""
