"""All forms, those of one field in one module."""

from __future__ import annotations

from pytest_trainloop.formulas import segmentation

FORMS = (*segmentation.FORMS,)
