"""All forms, those of one field in one module."""

from __future__ import annotations

from pytest_trainloop.formulas import (
    boxes,
    classification,
    contrastive,
    likelihoods,
    mixtures,
    policies,
    quantiles,
    segmentation,
    survival,
)

FORMS = (
    *boxes.FORMS,
    *segmentation.FORMS,
    *classification.FORMS,
    *likelihoods.FORMS,
    *mixtures.FORMS,
    *quantiles.FORMS,
    *policies.FORMS,
    *survival.FORMS,
    *contrastive.FORMS,
)
