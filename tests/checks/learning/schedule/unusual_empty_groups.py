"""Groups that hold nothing in this model, and are right."""

from __future__ import annotations

from pytest_trainloop import TrainLoop
from tests.checks.learning.schedule.faults_empty_groups import Net, Policy, by_part, by_prefix, trained
from tests.loops.odd import odd


@odd(notes="offsets of deformable attention get a tenth of the rate, and this model has none")
def a_rate_for_a_part_that_the_model_has_not() -> TrainLoop:
    return trained(by_part("sampling_offsets", 3e-4))()


@odd(notes="the backbone is frozen, and its group is left empty")
def group_of_a_frozen_backbone() -> TrainLoop:
    def frozen():
        model = Policy(Net())
        model.model["backbone"].requires_grad_(False)
        return model

    return trained(by_prefix("model.backbone"), frozen)()


@odd(notes="names of the wrapped and of the bare model are both looked for; one of them matches")
def names_of_both_forms_of_the_model() -> TrainLoop:
    def groups(model):
        named = list(model.named_parameters())
        slow = [p for name, p in named if name.startswith("model.backbone")]
        bare = [p for name, p in named if name.startswith("backbone")]
        rest = [p for name, p in named if not name.startswith(("model.backbone", "backbone"))]
        return [{"params": rest}, {"params": slow, "lr": 3e-4}, {"params": bare, "lr": 3e-4}]

    return trained(groups)()
