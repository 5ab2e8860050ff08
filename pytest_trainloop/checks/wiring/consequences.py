"""Checks that fail as a consequence where parameters do not train as they should."""

LEARNING = ("overfit_one_batch", "update_ratio")

TRAINING = (*LEARNING, "every_param_moves:not_updated")
