"""Properties of one loss function, described by a LossContract."""
