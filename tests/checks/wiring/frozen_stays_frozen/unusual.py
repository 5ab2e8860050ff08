"""Parameters at rest that move rightly, and moving parts that look frozen."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import loop
from tests.loops.random_data import curves, images, points


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(216, 4)

    def forward(self, x):
        return self.head(self.body(x))


def plain(model, optimizer, loss=F.cross_entropy, after=lambda: None):
    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            after()

    return fit


@odd(notes="frozen weights stand in the optimizer under decay; their gradients are None, and no step touches them")
def resting_weights_held_under_decay():
    model = Features()
    model.body.requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), frozen=("body.",), fit=plain(model, optimizer))


@odd(notes="a teacher follows its student by an average: it moves, and no optimizer holds it")
def resting_teacher_follows():
    student = relu_mlp(8, 16, 4)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)

    def fit(batches):
        for x, y in batches:
            with torch.no_grad():
                target = teacher(x).softmax(1)
            loss = F.cross_entropy(student(x), y) + 0.1 * F.cross_entropy(student(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)

    return TrainLoop(model=[student, teacher], optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="the norms of a frozen backbone keep following the data on purpose (AdaBN); the norms' own weights train")
def resting_backbone_with_trained_norms():
    model = Features()
    model.body[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=plain(model, optimizer))


@odd(notes="the trunk is unfrozen from the end, one layer every few steps, all in one optimizer with decay")
def resting_until_its_turn():
    model = relu_mlp(8, 16, 16, 4)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def fit(batches):
        for step, (x, y) in enumerate(batches):
            if step in (3, 6):
                layers[-1 - step // 3].requires_grad_(True)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="frozen after some steps: gradients are set to None, and its group leaves the optimizer")
def resting_after_leaving_the_optimizer():
    model = Features()
    optimizer = torch.optim.Adam(
        [{"params": model.body.parameters()}, {"params": model.head.parameters()}], lr=3e-3, weight_decay=1e-2
    )

    def fit(batches):
        for step, (x, y) in enumerate(batches):
            if step == 4:
                model.body.requires_grad_(False)
                optimizer.param_groups.pop(0)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=fit)


@odd(notes="alternating minimisation: each half requires grad in its turn, gradients are None, momentum is per half")
def resting_halves_in_turn():
    model = nn.ModuleDict({"left": relu_mlp(8, 16, 4), "right": relu_mlp(4, 16, 1)})
    optimizers = [torch.optim.SGD(model[k].parameters(), lr=0.05, momentum=0.9) for k in ("left", "right")]

    def fit(batches):
        for step, (x, y) in enumerate(batches):
            for turn, name in enumerate(("left", "right")):
                model[name].requires_grad_(step % 2 == turn)
            optimizer = optimizers[step % 2]
            optimizer.zero_grad()
            F.mse_loss(model["right"](model["left"](x)), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizers, batch=curves(), fit=fit)


@odd(notes="a fixed random feature map, tied rows that are re-normalised after each step, and a bias kept at zero")
def resting_and_restored_weights():
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def restore():
        with torch.no_grad():
            model[2].weight.div_(model[2].weight.norm(dim=1, keepdim=True))
            model[2].bias.zero_()

    restore()
    fit = plain(model, optimizer, after=restore)
    return TrainLoop(model=model, optimizer=optimizer, batch=points(), frozen=("0.",), fit=fit)


@odd(notes="only the largest gradients are used, others each step, under decay: what is zero now is not to hold")
def largest_gradients_only():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.grad.mul_(p.grad.abs() >= p.grad.abs().flatten().topk(max(1, p.numel() // 4)).values[-1])
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="weights past 1 get no gradient (a straight-through sign), and decay is to bring them back")
def no_gradient_past_the_limit():
    model = relu_mlp(8, 16, 4)
    with torch.no_grad():
        model[0].weight.mul_(4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            model[0].weight.grad.masked_fill_(model[0].weight.abs() > 1.0, 0.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="gradients of the last layer are cancelled for the first steps by None (DINO)")
def resting_last_layer_at_first():
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def fit(batches):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if step < 3:
                for p in model[-1].parameters():
                    p.grad = None
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="bfloat16 weights for the products, float32 masters for the optimizer, copied back after each step")
def resting_in_bfloat16_beside_masters():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(torch.bfloat16)
    masters = [p.detach().clone().float().requires_grad_(True) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)

    def fit(batches):
        for x, y in batches:
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(masters, model.parameters(), strict=True):
                    p.copy_(master)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="bfloat16 weights under a rate that is large enough for most of them")
def moving_in_bfloat16():
    model = relu_mlp(8, 16, 4).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return loop(
        model, points(), lambda model, batch: F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1]), optimizer
    )
