"""Target networks, averages, anchors and kept weights that are the weights that train, or never follow them."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.loops.nets import relu_mlp
from tests.loops.pairs import pair
from tests.loops.random_data import fresh, points


def trained(model, loss, *, lr=3e-3, after=lambda number: None, **declared):
    """A loop over ``loss(x, y)``."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss(x, y).backward()
            optimizer.step()
            after(number)

    return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit, **declared)


def transitions(rows=16):
    states, actions = torch.randn(rows, 8), torch.randint(4, (rows, 1))
    return states, actions, states[:, :1].tanh() + 0.1 * actions, torch.randn(rows, 8)


class Agent:
    """A DQN; ``copied`` makes its target network, ``follow`` brings that up to date."""

    def __init__(self, copied, follow):
        self.online = relu_mlp(8, 24, 4)
        self.target = copied(self.online)
        self.follow = follow
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=3e-3)

    def fit(self, batches):
        for states, actions, rewards, after in batches:
            with torch.no_grad():
                goal = rewards + 0.5 * self.target(after).amax(1, keepdim=True)
            loss = F.smooth_l1_loss(self.online(states).gather(1, actions), goal)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.follow(self.target, self.online)


def dqn(copied, follow):
    def make():
        agent = Agent(copied, follow)
        return TrainLoop(
            model={"online": agent.online, "target": agent.target},
            optimizer=agent.optimizer,
            batch=transitions(),
            batches=fresh(transitions),
            fit=agent.fit,
        )

    return make


def loaded(target, online):
    target.load_state_dict(online.state_dict())


def loaded_from_itself(target, online):
    target.load_state_dict(target.state_dict())


def shared(online):
    target = relu_mlp(8, 24, 4)
    target.load_state_dict(online.state_dict(), assign=True)
    return target


pair(
    "target_network_shares_its_weights",
    "target_networks",
    "copied_into_itself",
    culprits=("online.0.weight",),
    where="target.load_state_dict(online.state_dict())",
    faulty=dqn(shared, loaded),
    fixed=dqn(copy.deepcopy, loaded),
    quick=True,
)

pair(
    "target_network_loaded_from_itself",
    "target_networks",
    "copied_into_itself",
    culprits=("target.0.weight",),
    where="target.load_state_dict(target.state_dict())",
    faulty=dqn(copy.deepcopy, loaded_from_itself),
    fixed=dqn(copy.deepcopy, loaded),
)


def best_kept(kept, every=5):
    def make():
        model = relu_mlp(8, 16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held_out = points(12)

        def fit(batches):
            best, best_weights = float("inf"), None
            for number, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if number % every == every - 1:
                    with torch.no_grad():
                        loss = F.cross_entropy(model(held_out[0]), held_out[1]).item()
                    if loss < best:
                        best, best_weights = loss, kept(model.state_dict())
            if best_weights is not None:
                model.load_state_dict(best_weights)

        return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)

    return make


pair(
    "best_weights_kept_without_a_copy",
    "target_networks",
    "copied_into_itself",
    culprits=("0.weight",),
    where="model.load_state_dict(best_weights)",
    faulty=best_kept(lambda state: state),
    fixed=best_kept(copy.deepcopy),
)
pair(
    "best_weights_kept_in_a_shallow_copy_until_the_last_step",
    "target_networks",
    "copied_into_itself",
    culprits=("0.weight",),
    change="kept(model.state_dict())",
    faulty=best_kept(dict, every=4),
    fixed=best_kept(copy.deepcopy, every=4),
)


@torch.no_grad()
def average_of_loop_variables(target, online, tau=0.1):
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow = (1 - tau) * slow + tau * fast


@torch.no_grad()
def average_written(target, online, tau=0.1):
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.copy_((1 - tau) * slow + tau * fast)


pair(
    "soft_update_of_a_loop_variable",
    "target_networks",
    "average_dropped",
    culprits=("target.0.weight",),
    where="slow = (1 - tau) * slow + tau * fast",
    faulty=dqn(copy.deepcopy, average_of_loop_variables),
    fixed=dqn(copy.deepcopy, average_written),
    quick=True,
)


def average_in_a_dict(target, online, tau=0.1):
    slow, fast = target.state_dict(), online.state_dict()
    for name in slow:
        slow[name] = slow[name] + tau * (fast[name] - slow[name])


def average_in_a_dict_loaded(target, online, tau=0.1):
    slow, fast = target.state_dict(), online.state_dict()
    for name in slow:
        slow[name] = slow[name] + tau * (fast[name] - slow[name])
    target.load_state_dict(slow)


pair(
    "soft_update_of_a_state_dict",
    "target_networks",
    "average_dropped",
    culprits=("target.0.weight",),
    where="slow[name] = slow[name] + tau",
    faulty=dqn(copy.deepcopy, average_in_a_dict),
    fixed=dqn(copy.deepcopy, average_in_a_dict_loaded),
)


def proximal_gradient(kept):
    def make():
        model = relu_mlp(8, 16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches, mu=0.1):
            global_weights = kept(model.parameters())
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for weight, anchor in zip(model.parameters(), global_weights, strict=True):
                    weight.grad.data += mu * (weight.data - anchor.data)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)

    return make


pair(
    "proximal_gradient_from_the_weights_themselves",
    "target_networks",
    "anchor_moves_along",
    culprits=("0.weight",),
    where="mu * (weight.data - anchor.data)",
    faulty=proximal_gradient(list),
    fixed=proximal_gradient(lambda parameters: [p.detach().clone() for p in parameters]),
    quick=True,
)


class Anchored(nn.Module):
    """Fine-tuning that stays near the weights that it starts from (L2-SP)."""

    def __init__(self, kept):
        super().__init__()
        self.net = relu_mlp(8, 16, 4)
        self.start = {name: kept(p) for name, p in self.net.named_parameters()}

    def pull(self):
        return sum(F.mse_loss(p, self.start[name], reduction="sum") for name, p in self.net.named_parameters())


def fine_tuned(kept):
    def make():
        model = Anchored(kept)
        return trained(model, lambda x, y: F.cross_entropy(model.net(x), y) + 0.05 * model.pull())

    return make


pair(
    "start_of_fine_tuning_kept_without_a_copy",
    "target_networks",
    "anchor_moves_along",
    culprits=("net.0.weight",),
    where="F.mse_loss(p, self.start[name]",
    faulty=fine_tuned(lambda p: p.detach()),
    fixed=fine_tuned(lambda p: p.detach().clone()),
)


def averaged(each, shadow_of):
    def make():
        accumulate, model = 2, relu_mlp(8, 16, 4)
        shadow, move = shadow_of(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

        def fit(batches):
            for number, (x, y) in enumerate(batches, start=1):
                (F.cross_entropy(model(x), y) / accumulate).backward()
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if each or number % accumulate == 0:
                    with torch.no_grad():
                        move(shadow, model)
            if number % accumulate:
                optimizer.step()
                optimizer.zero_grad()

        return TrainLoop(model=model, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)

    return make


def in_a_copy(model):
    def move(shadow, model):
        for slow, fast in zip(shadow.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.01)

    return copy.deepcopy(model), move


def in_a_dict(model):
    def move(shadow, model):
        for name, weight in model.named_parameters():
            shadow[name] = 0.99 * shadow[name] + 0.01 * weight.detach()

    return {name: weight.detach().clone() for name, weight in model.named_parameters()}, move


for how, moved in ((in_a_copy, "slow.lerp_(fast, 0.01)"), (in_a_dict, "0.01 * weight.detach()")):
    pair(
        f"average_{how.__name__}_moved_for_each_micro_batch",
        "target_networks",
        "average_for_each_micro_batch",
        culprits=("0.weight",),
        where=moved,
        level="advice",
        faulty=averaged(each=True, shadow_of=how),
        fixed=averaged(each=False, shadow_of=how),
        quick=how is in_a_copy,
    )


def gap_added(model, sign):
    """The way in which torch_ema writes it; the difference is added where it is to be subtracted."""

    def move(shadow, model):
        for slow, fast in zip(shadow, model.parameters(), strict=True):
            slow.add_(sign * 0.01 * (slow - fast))

    return [weight.detach().clone() for weight in model.parameters()], move


def both_scaled(model, sign):
    def move(shadow, model):
        for slow, fast in zip(shadow.parameters(), model.parameters(), strict=True):
            slow.data.mul_(1 + sign * 0.01).sub_(fast.data, alpha=sign * 0.01)

    return copy.deepcopy(model), move


for how, moved in ((gap_added, "slow.add_("), (both_scaled, "slow.data.mul_(")):
    pair(
        f"average_moves_away_by_{how.__name__}",
        "target_networks",
        "average_moves_away",
        culprits=("0.weight",),
        where=moved,
        faulty=averaged(each=False, shadow_of=lambda model, how=how: how(model, 1)),
        fixed=averaged(each=False, shadow_of=lambda model, how=how: how(model, -1)),
    )


# An average of the parameters alone, evaluated: its batch norms keep the statistics of its start.


def normed_average(along=lambda average, model: None, *, teaches=False, started=False, mode=False):
    """Evaluated after ``fit``, or giving targets in it; ``along`` brings its buffers up to date."""

    def make():
        model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
        for _ in range(5 if started else 0):
            model(3.0 + torch.randn(16, 8))
        average = copy.deepcopy(model).requires_grad_(False).train(mode)

        def loss(x, y):
            wrong = F.cross_entropy(model(x), y)
            return wrong + F.mse_loss(model(x), average(x)) if teaches else wrong

        def follow(number):
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast.detach(), alpha=0.1)
            along(average, model)

        def evaluate():
            x, y = points()
            return float((average(x).argmax(1) == y).float().mean())

        return trained(model, loss, after=follow, **({} if teaches else {"evaluate": evaluate}))

    return make


def buffers_along(average, model):
    for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
        slow.copy_(fast)


pair(
    "evaluated_average_of_parameters_alone",
    "target_networks",
    "statistics_left_behind",
    culprits=("1",),
    where="slow.mul_(0.9).add_(fast.detach(), alpha=0.1)",
    faulty=normed_average(),
    fixed=normed_average(buffers_along),
    quick=True,
)

pair(
    "teacher_with_the_statistics_of_its_start",
    "target_networks",
    "statistics_left_behind",
    level="advice",
    faulty=normed_average(teaches=True, started=True),
    fixed=normed_average(buffers_along, teaches=True, started=True),
)
