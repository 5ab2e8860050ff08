"""Compiled loops that look wrong, and train as the eager ones do."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.checks.scale.compile_parity.compiled_loops import BACKEND, Classifier, batches, plain, steps
from tests.loops import data
from tests.loops.nets import GPT, lm_loss
from tests.loops.odd import odd


@odd(notes="texts of another length in every batch: compiled again with sizes that vary, once")
def compiled_over_texts_of_many_lengths(compile=False):
    model = GPT()
    called = torch.compile(model, backend=BACKEND) if compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            lm_loss(called, batch).backward()
            optimizer.step()

    texts = [data.tokens(rows=2, length=length, seed=length) for length in (6, 8, 7, 9, 10)]
    return TrainLoop(model=model, optimizer=optimizer, batches=texts, fit=fit)


@odd(notes="graph breaks in the middle of the model, which cost time and change nothing")
def compiled_with_breaks_that_do_no_harm(compile=False):
    class Logged(Classifier):
        def forward(self, x):
            features = self.encoder(x)
            self.largest = float(features.detach().abs().max())
            return self.head(features)

    model = Logged()
    return plain(model, torch.compile(model, backend=BACKEND) if compile else model)


@odd(notes="micro-batches, the last step of a window only: nothing of it is compiled")
def compiled_and_accumulated(compile=False, accumulate=1):
    model = Classifier()
    called = torch.compile(model, backend=BACKEND) if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for number, (x, y) in enumerate(batches):
            (F.cross_entropy(called(x), y) / accumulate).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)


@odd(notes="autocast around the call of the compiled model")
def compiled_under_autocast(compile=False):
    model = Classifier()
    called = torch.compile(model, backend=BACKEND) if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(called(x), y)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)


@odd(notes="dropout, which a compiler may draw in another order")
def compiled_with_dropout(compile=False):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.1))
    model.append(nn.Linear(16, 3))
    return plain(model, torch.compile(model, backend=BACKEND) if compile else model)


@odd(notes="the loss and the backward pass are compiled with the model, and break the graph once")
def compiled_training_step(compile=False):
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    called = torch.compile(step, backend=BACKEND) if compile else step

    def fit(batches):
        for x, y in batches:
            called(x, y)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)


@torch.compile(backend=BACKEND)
def smooth_loss(scores, target):
    return F.cross_entropy(scores, target, label_smoothing=0.1)


def eager_loss(scores, target):
    return F.cross_entropy(scores, target, label_smoothing=0.1)


@odd(notes="a loss that was compiled when the module was imported")
def compiled_loss_of_the_module(compile=False):
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = smooth_loss if compile else eager_loss

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)


@odd(notes="logits are cast to float32 in front of the loss: the gradients agree to rounding in float32")
def compiled_with_a_cast_to_float32(compile=False):
    class Cast(Classifier):
        def forward(self, x):
            return super().forward(x).float()

    model = Cast()
    return plain(model, torch.compile(model, backend=BACKEND) if compile else model)


@odd(notes="compiled on CUDA only: here the knob changes nothing")
def compiled_on_cuda_only(compile=False):
    model = Classifier()
    return plain(model, torch.compile(model) if compile and torch.cuda.is_available() else model)


@odd(notes="names of the compiled model lead to groups, after what compiling adds to them is taken off")
def compiled_model_grouped_by_plain_names(compile=False):
    model = Classifier()
    model = torch.compile(model, backend=BACKEND) if compile else model
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return plain(model, optimizer=torch.optim.AdamW(groups, lr=1e-2))


@odd(notes="an average of the weights, copied from the model before it was compiled")
def compiled_with_an_average_of_weights(compile=False):
    model = Classifier()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    called = torch.compile(model, backend=BACKEND) if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(batches):
        for batch in batches:
            steps(called, optimizer, [batch])
            average.update_parameters(model)

    return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)


@odd(notes="two compiled networks, stepped in turn")
def compiled_generator_and_discriminator(compile=False):
    made, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    make = torch.compile(made, backend=BACKEND) if compile else made
    score = torch.compile(judge, backend=BACKEND) if compile else judge
    of_made, of_judge = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (made, judge))
    latent = torch.randn(64, 8, 4)

    def fit(batches):
        for number, (x, _) in enumerate(batches):
            z = latent[number % 64].to(x.dtype)
            of_judge.zero_grad()
            real, fake = score(x), score(make(z).detach())
            (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
            of_judge.step()
            of_made.zero_grad()
            F.softplus(-score(make(z))).mean().backward()
            of_made.step()

    return TrainLoop(model={"made": made, "judge": judge}, optimizer=[of_made, of_judge], batches=batches(), fit=fit)


@odd(notes="parts of the model are left out at random, by Python's generator, in what is compiled")
def compiled_with_layers_dropped_by_python(compile=False):
    class Dropping(Classifier):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(8, 8)

        def forward(self, x):
            features = self.encoder(x)
            if self.training and random.random() < 0.5:
                features = features + self.extra(features)
            return self.head(features)

    model = Dropping()
    return plain(model, torch.compile(model, backend=BACKEND) if compile else model)


@odd(notes="closures: the loss is computed inside of the optimizer's step, several times")
def compiled_with_closures(compile=False):
    model = Classifier()
    called = torch.compile(model, backend=BACKEND) if compile else model
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def fit(batches):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(called(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)


@odd(notes="compiled in training only; evaluation in between runs the model that is not compiled")
def compiled_in_training_and_evaluated_eagerly(compile=False):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    called = torch.compile(model, backend=BACKEND) if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate():
        model.eval()
        with torch.no_grad():
            loss = sum(F.cross_entropy(model(x.to(model[0].weight.dtype)), y) for x, y in batches())
        model.train()
        return float(loss)

    def fit(given):
        for number, batch in enumerate(given):
            steps(called, optimizer, [batch])
            if number % 2:
                evaluate()

    return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)


@odd(notes="adapters are put into the model after it was compiled: the compiled model calls them")
def compiled_before_adapters_are_put_in(compile=False):
    class Adapted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear
            self.down, self.up = nn.Linear(linear.in_features, 2, bias=False), nn.Linear(2, linear.out_features)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.linear(x) + self.up(self.down(x))

    model = Classifier()
    called = torch.compile(model, backend=BACKEND) if compile else model
    model.requires_grad_(False)
    model.encoder[0] = Adapted(model.encoder[0])
    trained = [p for p in model.parameters() if p.requires_grad]
    return plain(model, called, torch.optim.AdamW(trained, lr=1e-2))


@odd(notes="a compiled optimizer step, whose rate a schedule changes: compiled again once, with a rate that varies")
def compiled_optimizer_step_on_a_schedule(compile=False):
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=50)
    step = torch.compile(optimizer.step, backend=BACKEND) if compile else optimizer.step

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            step()
            schedule.step()

    return TrainLoop(model=model, optimizer=optimizer, scheduler=schedule, batches=batches(), fit=fit)


@odd(notes="a function is compiled to see whether that works here, and the model only where it is worth it")
def compiling_is_tried_and_left(compile=False):
    model = Classifier()
    works = torch.compile(lambda x: x + 1, backend=BACKEND)(torch.zeros(1)).item() == 1.0 if compile else False
    large = sum(p.numel() for p in model.parameters()) > 10**6
    return plain(model, torch.compile(model, backend=BACKEND) if works and large else model)


@odd(notes="with compiling the rate is a tensor of single precision, so that it is no constant of a graph")
def rate_in_a_tensor_where_it_is_compiled(compile=False):
    model = Classifier()
    rate = torch.tensor(0.003, dtype=torch.float32) if compile else 0.003
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, capturable=False)
    return plain(model, torch.compile(model, backend=BACKEND) if compile else model, optimizer)
