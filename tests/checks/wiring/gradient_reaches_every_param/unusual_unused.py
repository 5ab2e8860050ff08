"""Parameters that take no part, on purpose or by configuration, in modules that do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.plain import loop
from tests.loops.random_data import fresh, points


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def adam_loop(model, batches=None):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=batches,
        fit=lambda given: train(model, optimizer, given),
    )


class KnowsItsDevice(nn.Module):
    def __init__(self):
        super().__init__()
        self.dummy = nn.Parameter(torch.empty(0))
        self.net = relu_mlp(8, 16, 4)

    def forward(self, x):
        return self.net(x.to(self.dummy.device))


@odd(notes="a parameter without elements, kept only to know the device: it is used in forward and never has a gradient")
def empty_parameter_that_tracks_the_device() -> TrainLoop:
    return adam_loop(KnowsItsDevice(), batches=fresh(points))


class WithReconstruction(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.classifier, self.decoder = relu_mlp(8, 16, 6), nn.Linear(6, 4), relu_mlp(6, 16, 8)

    def losses(self, x, y):
        h = self.encoder(x)
        return {"class": F.cross_entropy(self.classifier(h), y), "reconstruction": F.mse_loss(self.decoder(h), x)}


def train_weighted(model, optimizer, batches, weights):
    for x, y in batches:
        losses = model.losses(x, y)
        optimizer.zero_grad()
        sum(weights[name] * loss for name, loss in losses.items()).backward()
        optimizer.step()


@odd(notes="one loss has weight 0 in this configuration: its decoder has gradients of exactly 0 (an ablation)")
def auxiliary_loss_of_weight_zero() -> TrainLoop:
    model = WithReconstruction()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_weighted(model, optimizer, batches, {"class": 1.0, "reconstruction": 0.0}),
    )


class BalancedMoE(nn.Module):
    """Loss-free balancing: a bias steers which experts are chosen and is moved by a rule, never by a gradient."""

    def __init__(self, width=12, experts=4, speed=0.02):
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(8, width), nn.Linear(width, experts), nn.Linear(width, 4)
        self.experts = nn.ModuleList([relu_mlp(width, 12, width) for _ in range(experts)])
        self.balance, self.speed = nn.Parameter(torch.zeros(experts)), speed

    def forward(self, x):
        h = torch.relu(self.stem(x))
        score = self.gate(h).sigmoid()
        chosen = (score + self.balance).topk(2, dim=1).indices
        if self.training:
            self.count = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        weight = torch.zeros_like(score).scatter(1, chosen, score.gather(1, chosen))
        each = torch.stack([expert(h) for expert in self.experts], 1)
        return self.head(h + torch.einsum("ne,new->nw", weight / weight.sum(1, keepdim=True), each))

    @torch.no_grad()
    def rebalance(self):
        count = self.count.to(self.balance.dtype)
        self.balance.add_(self.speed * (count.mean() - count).sign())


def train_balanced(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.rebalance()


@odd(
    notes="a parameter in the optimizer that only enters a top-k: it never has a gradient and is moved by hand "
    "(loss-free balancing)"
)
def moe_bias_moved_by_a_rule() -> TrainLoop:
    model = BalancedMoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_balanced(model, optimizer, batches),
    )


class DetachedRouter(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList([nn.Linear(8, width) for _ in range(3)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        weight = self.router(x).softmax(1).detach()
        each = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head(torch.relu(torch.einsum("ne,new->nw", weight, each)))


@odd(notes="the router is detached on purpose, and the project says so with frozen=")
def detached_router_declared_frozen() -> TrainLoop:
    model = DetachedRouter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        frozen=("router.",),
        fit=lambda batches: train(model, optimizer, batches),
    )


class MessagePassing(nn.Module):
    """The batch at hand may have no edges; the message net is then called with zero rows."""

    def __init__(self):
        super().__init__()
        self.message, self.update = relu_mlp(16, 12, 8), nn.Linear(16, 4)

    def forward(self, nodes, edges):
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], 1))
        gathered = torch.zeros_like(nodes).index_add(0, target, messages)
        return self.update(torch.cat([nodes, gathered], 1))


def train_graphs(model, optimizer, batches):
    for nodes, edges, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(nodes, edges), labels).backward()
        optimizer.step()


@odd(notes="the only graph declared has no edges, so the message net runs on zero rows (the project has other graphs)")
def graph_without_edges() -> TrainLoop:
    model = MessagePassing()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    nodes, labels = points()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=(nodes, torch.zeros(2, 0, dtype=torch.long), labels),
        fit=lambda batches: train_graphs(model, optimizer, batches),
    )


def train_two_roots(model, optimizer, batches):
    for x, y in batches:
        losses = model.losses(x, y)
        optimizer.zero_grad()
        roots = [losses["class"], losses["reconstruction"]]
        torch.autograd.backward(
            roots, grad_tensors=[torch.tensor(1.0, dtype=x.dtype), torch.tensor(0.5, dtype=x.dtype)]
        )
        optimizer.step()


@odd(notes="two roots in one call of torch.autograd.backward, each with its weight as the gradient")
def two_weighted_roots_in_one_backward() -> TrainLoop:
    model = WithReconstruction()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        fit=lambda batches: train_two_roots(model, optimizer, batches),
    )


def train_row_losses(model, optimizer, batches):
    for x, y in batches:
        losses = F.cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        losses.backward(gradient=torch.full_like(losses, 1 / len(losses)))
        optimizer.step()


@odd(notes="the root is a vector, backpropagated with its weights as an argument: there is no scalar loss")
def vector_root_with_row_weights() -> TrainLoop:
    model = relu_mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=points(),
        batches=fresh(points),
        fit=lambda batches: train_row_losses(model, optimizer, batches),
    )


class ManyTasks(nn.Module):
    """A head a task; the head of every task runs, for a dashboard."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(24, 4), "colour": nn.Linear(24, 3), "age": nn.Linear(24, 1)})

    def forward(self, x):
        hidden = self.trunk(x)
        return {task: head(hidden) for task, head in self.heads.items()}


@odd(notes="every head runs, and this batch has labels of one task only (tasks take turns)")
def tasks_that_take_turns() -> TrainLoop:
    model = ManyTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = points()

    def fit(batches):
        for batch in batches:
            out = model(batch["x"])
            optimizer.zero_grad()
            F.cross_entropy(out[batch["task"]], batch["labels"]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch={"x": x, "task": "kind", "labels": y}, fit=fit)


class Masked(nn.Module):
    """Masked modelling: the token that replaces what is hidden; this stage fine-tunes on whole rows."""

    def __init__(self):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(12))
        self.embed, self.head = nn.Linear(8, 12), relu_mlp(12, 16, 4)

    def forward(self, x, hidden=None):
        tokens = self.embed(x)
        if hidden is not None:
            tokens = torch.where(hidden[:, None], self.mask_token, tokens)
        return self.head(tokens)


@odd(notes="the mask token of pretraining is still in the model that is fine-tuned")
def mask_token_after_pretraining() -> TrainLoop:
    return adam_loop(Masked())


def train_first_head(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"])["kind"], batch["kind"]).backward()
        optimizer.step()


@odd(
    notes="the first stage trains one head; the batch has ages, which a metric reads, and the project froze their head"
)
def stage_that_declares_the_other_heads_frozen() -> TrainLoop:
    model = ManyTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = points()
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch={"x": x, "kind": y, "age": x.norm(dim=1)},
        frozen=("heads.colour", "heads.age"),
        fit=lambda batches: train_first_head(model, optimizer, batches),
    )


@odd(notes="the batch holds a teacher's scores, of the shape of an unused head's, and weighs the loss by them")
def teacher_scores_beside_an_unused_head() -> TrainLoop:
    model = ManyTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = points()

    def fit(batches):
        for batch in batches:
            out = model(batch["x"])
            optimizer.zero_grad()
            loss = F.cross_entropy(out["kind"], batch["kind"])
            weight = batch["scores"].softmax(-1)[:, :1]
            (loss * weight.mean()).backward()
            optimizer.step()

    batch = {"x": x, "kind": y, "scores": torch.randn(len(x), 3)}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = relu_mlp(8, 16, 12), nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.policy(hidden), self.value(hidden)[:, 0]


@odd(notes="a policy is cloned from recorded steps before reinforcement: their rewards are there, values are for later")
def policy_cloned_from_recorded_steps() -> TrainLoop:
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = points()

    def fit(batches):
        for batch in batches:
            scores, _value = model(batch["states"])
            optimizer.zero_grad()
            F.cross_entropy(scores, batch["actions"]).backward()
            optimizer.step()

    batch = {"states": x, "actions": y, "rewards": x.sum(1), "camera": torch.arange(len(x)) % 3}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        return self.fc(self.body(x))


class FromHiddenLayer(nn.Module):
    """byol-pytorch, and Dino of vit-pytorch: a hook keeps what the layer before the classifier gives."""

    def __init__(self, net):
        super().__init__()
        self.net, self.head, self.hidden = net, nn.Linear(16, 4), None
        net.body.register_forward_hook(self.keep)

    def keep(self, _module, _inputs, output):
        self.hidden = output

    def forward(self, x):
        self.net(x)
        return self.head(self.hidden)


@odd(notes="a forward hook takes the features; the classifier behind them is computed, and its output dropped")
def classifier_behind_a_hooked_layer() -> TrainLoop:
    return adam_loop(FromHiddenLayer(Backbone()))


class KeepsFeatures(nn.Module):
    """A network whose features are an attribute after each call, with a head of several layers."""

    def __init__(self):
        super().__init__()
        self.body, self.features = relu_mlp(8, 16, 16), None
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x):
        self.features = self.body(x)
        return self.head(self.features)


@odd(notes="the loop calls the whole network, drops its output and reads the features that it keeps as an attribute")
def features_read_from_an_attribute() -> TrainLoop:
    net, probe = KeepsFeatures(), nn.Linear(16, 4)
    optimizer = torch.optim.Adam([*net.parameters(), *probe.parameters()], lr=1e-2)

    def fit(batches):
        for x, y in batches:
            net(x)
            optimizer.zero_grad()
            F.cross_entropy(probe(net.features), y).backward()
            optimizer.step()

    return TrainLoop(model={"net": net, "probe": probe}, optimizer=optimizer, batch=points(), fit=fit)


@odd(notes="a network that gives every layer's output as a list, of which the loss uses one before the last")
def layer_before_the_last_of_a_list() -> TrainLoop:
    layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4)])
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)

    class AllLayers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            given = []
            for layer in self.layers:
                given.append(layer(x))
                x = torch.tanh(given[-1])
            return given

    net = AllLayers()
    return loop(net, points(), lambda _, batch: F.cross_entropy(net(batch[0])[-2], batch[1]), optimizer)


class Distilled(nn.Module):
    """As DistillWrapper of vit-pytorch: one module holds student and teacher."""

    def __init__(self, soft, teacher):
        super().__init__()
        self.teacher, self.student, self.soft = teacher or relu_mlp(8, 16, 4), nn.Linear(8, 4), soft

    def losses(self, x, y):
        with torch.no_grad():
            wanted = self.teacher(x)
        scores = self.student(x)
        return F.cross_entropy(scores, y) + self.soft(scores, wanted)


def distilled(soft, teacher=None) -> TrainLoop:
    model = Distilled(soft, teacher)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return loop(model, points(), lambda model, batch: model.losses(batch[0], batch[1]), optimizer)


@odd(notes="the teacher runs under no_grad() inside the wrapper whose parameters the optimizer gets (vit-pytorch)")
def teacher_in_the_wrapper_of_its_student() -> TrainLoop:
    def soft(scores, wanted):
        wanted = F.softmax(wanted / 3, -1).detach()
        return 9 * F.kl_div(F.log_softmax(scores / 3, -1), wanted, reduction="batchmean")

    return distilled(soft)


@odd(notes="a teacher under no_grad() gives hard labels, or is subtracted; the optimizer holds its weights as well")
def teacher_whose_scores_are_subtracted() -> TrainLoop:
    def soft(scores, wanted):
        return (scores - wanted).square().mean() + F.cross_entropy(scores, wanted.argmax(1))

    return distilled(soft)


class WithIdleParts(nn.Module):
    """A bias that the batch norm behind it takes away again, and a pooler that nothing calls."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.pooler, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


@odd(notes="some parameters of the teacher move nothing: a bias before a batch norm, a pooler that is not used")
def teacher_with_idle_parts() -> TrainLoop:
    def soft(scores, wanted):
        return F.kl_div(F.log_softmax(scores, -1), F.softmax(wanted, -1), reduction="batchmean")

    return distilled(soft, WithIdleParts())
