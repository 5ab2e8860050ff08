"""Steps of torch's optimizers made again on copies."""
