"""Training loops that the tests share."""
