"""Measurements that several checks share. None of them knows a check."""
