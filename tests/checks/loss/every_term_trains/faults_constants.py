"""Terms that are one constant by their formula: a value compared with itself, an extreme that is the fill of a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.checks.loss.every_term_trains.faults import CHECK, loop
from tests.loops.nets import mlp
from tests.loops.pairs import pair

# A value compared with itself.


def two_views(strong_of):
    def loss_of(model, x, y):
        weak, strong = model(x), model(x + 0.3 * torch.sin(7 * x))
        chosen = strong_of(weak, strong)
        consistency = F.mse_loss(chosen.softmax(-1), weak.softmax(-1).detach())
        return F.cross_entropy(weak, y) + F.cross_entropy(strong, y) + 2.0 * consistency

    return loop(loss_of)


pair(
    "weak_view_compared_with_itself",
    CHECK,
    "compared_with_itself",
    culprits=("mse_loss",),
    where="consistency = F.mse_loss(",
    quick=True,
    faulty=two_views(lambda weak, strong: weak),
    fixed=two_views(lambda weak, strong: strong),
)


def distilled_on_scores(teacher_of):
    def loss_of(model, x, y):
        both = model(x)
        student, teacher = both[:, :3], both[:, 3:]
        soft = F.softmax(teacher_of(student, teacher).detach() / 2, dim=-1)
        term = F.kl_div(F.log_softmax(student / 2, dim=-1), soft, reduction="batchmean")
        return F.cross_entropy(student, y) + F.cross_entropy(teacher, y) + 4 * term

    return loop(loss_of, lambda: mlp(6, 24, 6))


pair(
    "student_distilled_from_its_own_scores",
    CHECK,
    "compared_with_itself",
    culprits=("kl_div",),
    where="term = F.kl_div(",
    faulty=distilled_on_scores(lambda student, teacher: student),
    fixed=distilled_on_scores(lambda student, teacher: teacher),
)


def aspect(second):
    """Boxes as (x, y, w, h), positive by softplus; the shapes of predicted and true boxes are compared."""

    def shape_of(box):
        return torch.atan(box[:, 2] / box[:, 3])

    def loss_of(model, x, _y):
        box, target = F.softplus(model(x)) + 0.1, x[:, :4].abs() + 0.5
        v = (shape_of(second(box, target)) - shape_of(box)).square()
        return F.l1_loss(box, target) + v.mean()

    return loop(loss_of, lambda: mlp(6, 24, 4))


pair(
    "shape_of_a_box_compared_with_its_own",
    CHECK,
    "compared_with_itself",
    culprits=("sub",),
    where="v = (shape_of(",
    faulty=aspect(lambda box, target: box),
    fixed=aspect(lambda box, target: target),
)


# An extreme that is always the fill of a mask.


def hardest(distances_of):
    """The nearest row of another class is pushed away: rows of one class are masked."""

    def loss_of(model, x, y):
        z = F.normalize(model(x), dim=-1)
        similarity, same = z @ z.T, y[:, None] == y[None, :]
        nearest = distances_of(similarity, same)
        farthest = (1 - similarity).masked_fill(~same, -1.0).amax(1)
        return F.relu(farthest - nearest + 0.5).mean() + (z.mean(0) ** 2).sum()

    return loop(loss_of)


pair(
    "largest_of_distances_masked_with_infinity",
    CHECK,
    "fill_chosen",
    culprits=("amax",),
    where="-torch.inf)).amax(1)",
    quick=True,
    faulty=hardest(lambda similarity, same: (1 - similarity.masked_fill(same, -torch.inf)).amax(1)),
    fixed=hardest(lambda similarity, same: (1 - similarity.masked_fill(same, -torch.inf)).amin(1)),
)
