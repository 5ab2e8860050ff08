"""The methods of ``torch.distributions`` that losses are made of."""

from __future__ import annotations

from pytest_trainloop.declare.callcontract import CallContract
from pytest_trainloop.instruments.losses.table.entry import Entry

_PAGE = "https://docs.pytorch.org/docs/stable/distributions.html"

ENTRIES = (
    Entry(
        names=("torch.distributions.Distribution.log_prob",),
        contracts=(CallContract(arguments={"value": "distribution_value"}, gives="similarity"),),
        page=_PAGE,
    ),
    Entry(
        names=("torch.distributions.Distribution.entropy",),
        contracts=(CallContract(arguments={}, gives="similarity"),),
        page=_PAGE,
    ),
    Entry(
        names=("torch.distributions.Categorical.__init__",),
        contracts=(CallContract(arguments={"logits": "class_logits"}, class_dim=-1),),
        page=_PAGE,
    ),
    Entry(
        names=("torch.distributions.Bernoulli.__init__",),
        contracts=(CallContract(arguments={"logits": "logits"}),),
        page=_PAGE,
    ),
)
"""``probs=`` of a Categorical need not sum to 1, and what a Bernoulli refuses it raises for."""
