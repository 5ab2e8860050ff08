"""Networks beside the one that trains that look like a fault of ``target_networks``, and are right."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.wiring.target_networks.faults import normed_average, trained
from tests.checks.wiring.target_networks.faults_left_behind import actor_critic, teacher_from
from tests.loops import plain
from tests.loops.nets import relu_mlp
from tests.loops.odd import odd
from tests.loops.random_data import fresh, points


def dropping(classes=4):
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, classes))


@odd(notes="a target network in training mode, with dropout, is loaded after 500 steps (a DQN with dropout)")
def target_with_dropout_loaded_seldom():
    online = dropping()
    target = copy.deepcopy(online).requires_grad_(False)

    def loss(x, y):
        with torch.no_grad():
            goal = x[:, 0] + 0.5 * target(x.roll(1, 1)).amax(1)
        return F.smooth_l1_loss(online(x)[torch.arange(len(x)), y], goal)

    def after(number):
        if number % 500 == 499:
            target.load_state_dict(online.state_dict())

    return trained(online, loss, after=after)


@odd(notes="the teacher is put into training mode by name: its dropout is wanted as noise in the targets")
def teacher_noisy_by_name():
    student, teacher = relu_mlp(8, 12, 4), dropping().requires_grad_(False)
    teacher.train()

    def loss(x, y):
        with torch.no_grad():
            goal = teacher(x).softmax(1)
        scores = student(x)
        return F.cross_entropy(scores, y) + 0.5 * F.cross_entropy(scores, goal)

    return trained(student, loss)


@odd(notes="the targets are the mean of several passes of a teacher with dropout (Bayesian dark knowledge)")
def teacher_sampled_by_dropout():
    student, teacher = relu_mlp(8, 12, 4), dropping().requires_grad_(False)

    def loss(x, y):
        with torch.no_grad():
            goal = torch.stack([teacher(x).softmax(1) for _ in range(4)]).mean(0)
        scores = student(x)
        return F.cross_entropy(scores, y) + 0.5 * F.cross_entropy(scores, goal)

    return trained(student, loss)


@odd(notes="a frozen trunk with dropout gives features to a head that trains: noise in inputs is regularisation")
def frozen_features_with_dropout():
    trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2)).requires_grad_(False)
    head = nn.Linear(24, 4)

    def loss(x, y):
        with torch.no_grad():
            features = trunk(x)
        return F.cross_entropy(head(features), y)

    return trained(head, loss)


@odd(
    notes="the model's own prediction on clean rows, under no_grad and with dropout, is the target of noisy ones (UDA)"
)
def own_prediction_as_target():
    model = dropping()

    def loss(x, y):
        with torch.no_grad():
            goal = model(x).softmax(1)
        return F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), goal)

    return trained(model, loss)


@odd(notes="weights half-way between start and present are evaluated in a third net after each step (WiSE-FT)")
def interpolated_weights_evaluated():
    model = relu_mlp(8, 16, 4)
    start, between = copy.deepcopy(model), copy.deepcopy(model)
    curve = []

    @torch.no_grad()
    def after(number):
        first, last = start.state_dict(), model.state_dict()
        between.load_state_dict({name: 0.5 * first[name] + 0.5 * last[name] for name in first})
        curve.append(F.cross_entropy(between(points()[0]), torch.zeros(8, dtype=torch.long)).item())

    return trained(model, lambda x, y: F.cross_entropy(model(x), y), after=after)


@odd(notes="w - w.detach() is 0, and has a slope: a penalty whose gradient alone is wanted")
def difference_with_what_is_detached():
    model = relu_mlp(8, 16, 4)
    pull = torch.randn(16, 8)

    def loss(x, y):
        weight = model[0].weight
        still = weight.detach()
        return F.cross_entropy(model(x), y) + 0.01 * ((weight - still) * pull).sum()

    return trained(model, loss)


@odd(
    notes="the weights are written back once from the live state dict, in which nothing has changed since it was taken"
)
def own_state_loaded_once():
    model = relu_mlp(8, 16, 4)

    def after(number):
        if number == 2:
            state = model.state_dict()
            assert set(state) == {name for name, _ in model.named_parameters()}
            model.load_state_dict(state)

    return trained(model, lambda x, y: F.cross_entropy(model(x), y), after=after)


@odd(
    notes="the target network shares a fixed embedding of states with the online one, and is loaded with it as a whole"
)
def target_that_shares_a_fixed_layer():
    lift = nn.Linear(8, 12).requires_grad_(False)
    online = nn.Sequential(lift, nn.Tanh(), nn.Linear(12, 4))
    target = nn.Sequential(lift, nn.Tanh(), nn.Linear(12, 4))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online[2].parameters(), lr=3e-3)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            with torch.no_grad():
                goal = x[:, 0] + 0.5 * target(x.roll(1, 1)).amax(1)
            optimizer.zero_grad()
            F.smooth_l1_loss(online(x)[torch.arange(len(x)), y], goal).backward()
            optimizer.step()
            if number % 3 == 2:
                target.load_state_dict(online.state_dict())

    return TrainLoop(model=online, optimizer=optimizer, batch=points(), batches=fresh(points), fit=fit)


@odd(notes="labels are drawn before fit by a net with dropout, many times for each row, and averaged")
def labels_averaged_over_dropout():
    model, labeller = relu_mlp(8, 16, 4), dropping()
    rows = torch.randn(64, 8)
    with torch.no_grad():
        soft = torch.stack([labeller(rows).softmax(1) for _ in range(8)]).mean(0)

    def drawn():
        chosen = torch.randint(64, (8,))
        return rows[chosen], soft[chosen]

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return plain.loop(model, drawn(), plain.cross_entropy, optimizer, batches=fresh(drawn))


@odd(notes="a dry pass with dropout before fit finds the width of the features, and nothing else is taken from it")
def dry_pass_before_fit():
    trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.2))
    with torch.no_grad():
        width = trunk(torch.randn(2, 8)).shape[1]
    model = nn.Sequential(trunk, nn.Linear(width, 4))
    return trained(model, lambda x, y: F.cross_entropy(model(x), y))


@odd(notes="the generator's average moves once a batch, and the generator once in three: the critic steps in between")
def average_of_a_generator_that_steps_seldom():
    generator, critic = relu_mlp(4, 16, 2), relu_mlp(2, 16, 1)
    average = copy.deepcopy(generator).requires_grad_(False)
    by_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    by_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)

    def ring(rows=16):
        angle = 6.2832 * torch.rand(rows, 1)
        return torch.cat([angle.cos(), angle.sin()], 1)

    def fit(batches):
        for number, real in enumerate(batches):
            made = generator(torch.randn(len(real), 4))
            by_critic.zero_grad()
            (F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()).backward()
            by_critic.step()
            if number % 3 == 2:
                by_generator.zero_grad()
                F.softplus(-critic(generator(torch.randn(len(real), 4)))).mean().backward()
                by_generator.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), generator.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)

    return TrainLoop(
        model={"generator": generator, "critic": critic},
        optimizer=[by_generator, by_critic],
        batch=ring(),
        batches=fresh(ring),
        fit=fit,
    )


@odd(notes="a teacher in training mode normalises by the batch, and its statistics move of themselves")
def teacher_in_training_mode():
    return normed_average(teaches=True, mode=True)()


@odd(notes="the buffers of the average are those of the model")
def average_that_shares_its_buffers():
    def shared(average, model):
        average[1].running_mean, average[1].running_var = model[1].running_mean, model[1].running_var

    return normed_average(shared)()


@odd(notes="the batch norms of a network that was trained before are frozen, and so are those of its average")
def frozen_norms_and_their_average():
    loop = normed_average(started=True)()
    loop.model[1].eval()
    return loop


@odd(notes="the statistics of the average are collected before it is evaluated")
def update_bn_before_evaluation():
    def collected(average, model):
        average.train()(points()[0])
        average.eval()

    return normed_average(collected)()


@odd(notes="heavy-ball momentum by hand moves each weight by its difference from the one before")
def momentum_by_hand():
    model = relu_mlp(8, 16, 4)
    before = [p.detach().clone() for p in model.parameters()]

    def after(number):
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                moved = p.clone()
                p.add_(0.1 * (p - old))
                old.copy_(moved)

    return trained(model, lambda x, y: F.cross_entropy(model(x), y), after=after)


@odd(notes="evaluated weights lie beyond the present ones, as seen from the average")
def weights_beyond_the_average():
    model, shown = relu_mlp(8, 16, 4), relu_mlp(8, 16, 4).requires_grad_(False)
    average = copy.deepcopy(model).requires_grad_(False)

    def after(number):
        with torch.no_grad():
            for p, slow, out in zip(model.parameters(), average.parameters(), shown.parameters(), strict=True):
                slow.lerp_(p, 0.1)
                out.copy_(1.5 * p - 0.5 * slow)

    return trained(model, lambda x, y: F.cross_entropy(model(x), y), after=after)


@odd(notes="the memory of the last changes grows by the change, not by a difference of weights")
def changes_added_up():
    model = relu_mlp(8, 16, 4)
    before = [p.detach().clone() for p in model.parameters()]
    total = [torch.zeros_like(p) for p in before]

    def after(number):
        with torch.no_grad():
            for p, old, sums in zip(model.parameters(), before, total, strict=True):
                sums.mul_(1.1).add_(p - old)
                old.copy_(p)

    return trained(model, lambda x, y: F.cross_entropy(model(x), y), after=after)


@odd(notes="one particle is pushed away from the other, and both train")
def particles_that_repel():
    one, other = relu_mlp(8, 16, 4), relu_mlp(8, 16, 4)
    both = nn.ModuleList([one, other])

    def after(number):
        with torch.no_grad():
            for p, q in zip(one.parameters(), other.parameters(), strict=True):
                p.add_(0.001 * (p - q))

    return trained(both, lambda x, y: F.cross_entropy(one(x), y) + F.cross_entropy(other(x), y), after=after)


@odd(notes="the target of the actor is brought up to date after every fifth batch (TD3)")
def target_actor_that_follows_seldom():
    return actor_critic(actor=5, first=1, second=1)()


@odd(notes="a copy of the first policy is kept as it is; its log-probabilities meet a target critic's values")
def first_policy_beside_a_target_critic():
    policy, critic = relu_mlp(8, 24, 4), relu_mlp(8, 24, 4)
    first, target = copy.deepcopy(policy).requires_grad_(False), copy.deepcopy(critic).requires_grad_(False)
    target[-1], critic[-1] = (nn.Linear(24, 4) for _ in range(2))
    target.load_state_dict(critic.state_dict())

    def loss(x, y):
        with torch.no_grad():
            kept = first(x).log_softmax(1)
            goal = x[:, 0] + 0.5 * (target(x).amax(1) + 0.1 * kept.amax(1))
        scores = policy(x).log_softmax(1)
        value = critic(x)[torch.arange(len(x)), y]
        return F.mse_loss(value, goal) + F.kl_div(scores, kept, log_target=True, reduction="batchmean") - scores.mean()

    def after(number):
        for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.05)

    both = nn.ModuleDict({"policy": policy, "critic": critic})
    return trained(both, loss, after=after)


@odd(notes="one function measures the network that it is given: the teacher once, then the student")
def teacher_and_student_measured_by_one_line():
    student, teacher = relu_mlp(8, 24, 4), relu_mlp(8, 24, 4).requires_grad_(False)
    scores = []

    def measure(net, x, y):
        with torch.no_grad():
            scores.append(float((net(x).argmax(1) == y).float().mean()))

    def loss(x, y):
        measure(student if scores else teacher, x, y)
        return F.cross_entropy(student(x), y)

    return trained(student, loss)


@odd(notes="the teacher of the first batches is followed by an average of the student")
def average_after_a_fixed_teacher():
    return teacher_from(assign=False)()
