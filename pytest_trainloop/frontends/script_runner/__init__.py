"""A training script run unchanged under watch: ``python -m pytest_trainloop train.py``."""
