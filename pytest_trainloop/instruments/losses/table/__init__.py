"""The table of loss functions: what torch's and other libraries' take, as data, and what a project registers."""

from __future__ import annotations

from pytest_trainloop.instruments.losses.table.entry import Chance, Entry
from pytest_trainloop.instruments.losses.table.lookup import lookup
from pytest_trainloop.instruments.losses.table.registered import register_contract

__all__ = ["Chance", "Entry", "lookup", "register_contract"]
