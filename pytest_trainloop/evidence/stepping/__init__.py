"""Single steps of torch's own optimizers, made again on copies: in float64, by other variants, on gradients of zero."""
