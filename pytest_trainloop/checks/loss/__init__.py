"""Whether the loss is used as it is meant and starts where it should."""
