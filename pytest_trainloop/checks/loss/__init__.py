"""Whether the loss is used as documented and starts where it should."""
