"""Function modes: provenance of tensors, one forward pass, the first value that is not finite."""
