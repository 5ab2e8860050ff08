"""What the tensors of a batch are: ids, masks, labels, lengths or features; and their axes of rows and positions."""

from __future__ import annotations

from pytest_trainloop.batches.roles.reading import Part, Role, Roles, read

__all__ = ["Part", "Role", "Roles", "read"]
