"""Make runs of the user's loop, as it is written or varied in one respect."""
