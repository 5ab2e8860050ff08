"""What a graph holds that the eager loop reads anew, and what its operators do without saying so."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from pytest_trainloop import TrainLoop
from tests.checks.scale.compile_parity.compiled_loops import BACKEND, CHECK, Classifier, batches, compiling, plain
from tests.loops.pairs import pair

# The temperature falls while the model trains, and guards on attributes of modules were left out to save time.


class Tempered(Classifier):
    def __init__(self):
        super().__init__()
        self.temperature = 2.0

    def forward(self, x):
        return super().forward(x) / self.temperature


def annealed(**options):
    def make(compile=False):
        model = Tempered()
        called = torch.compile(model, backend=BACKEND, **options) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for step, (x, y) in enumerate(batches):
                model.temperature = 1.0 + 1.0 / (1 + step)
                optimizer.zero_grad()
                F.cross_entropy(called(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)

    return make


pair(
    "temperature_without_a_guard",
    CHECK,
    "stale_value",
    culprits=("guard_filter_fn",),
    where="torch.compile(model",
    faulty=annealed(options={"guard_filter_fn": lambda entries: [False for _ in entries]}),
    fixed=annealed(),
    quick=True,
)


# The model is traced before it trains: what depends on its values is decided once.


class Gated(Classifier):
    """Large inputs are squashed."""

    def __init__(self, *, in_python):
        super().__init__()
        self.in_python = in_python

    def forward(self, x):
        features = self.encoder(x)
        if self.in_python:
            return self.head(features if float(x.abs().mean()) < 0.1 else features.tanh())
        return self.head(torch.where(x.abs().mean() < 0.1, features, features.tanh()))


def traced(*, in_python):
    def make(compile=False):
        model = Gated(in_python=in_python)
        called = torch.jit.trace(model, torch.zeros(8, 6), check_trace=False) if compile else model
        return plain(model, called)

    return make


pair(
    "traced_with_an_example_of_zeros",
    CHECK,
    "compiled_code_differs",
    where="torch.jit.trace(model",
    faulty=traced(in_python=True),
    fixed=traced(in_python=False),
    quick=True,
)


# An operator of the project's own updates running statistics, and does not declare that it writes to them.


@torch.library.custom_op("trainloop_tests::track", mutates_args=())
def track_undeclared(mean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    mean.lerp_(x.mean(0), 0.1)
    return mean.sum()


@torch.library.custom_op("trainloop_tests::track_declared", mutates_args=("mean",))
def track_declared(mean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    mean.lerp_(x.mean(0), 0.1)
    return mean.sum()


@track_undeclared.register_fake
@track_declared.register_fake
def _(mean, x):
    return mean.new_empty(())


class Centred(Classifier):
    def __init__(self, track):
        super().__init__()
        self.track = track
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.track(self.mean, x)
        return super().forward(x - self.mean)


def centred(track):
    def make(compile=False):
        model = Centred(track)
        return plain(model, torch.compile(model, backend=BACKEND) if compile else model)

    return make


pair(
    "operator_writes_to_what_it_does_not_declare",
    CHECK,
    "operator_misdeclared",
    culprits=("trainloop_tests::track",),
    where="self.track(self.mean, x)",
    faulty=centred(track_undeclared),
    fixed=centred(track_declared),
    quick=True,
)


# A backend of the project's own, with a pass that makes activations cheaper, for inference.


def cheaper(kind):
    def backend(graph, example_inputs):
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is F.gelu:
                node.kwargs = {**node.kwargs, "approximate": kind}
        graph.recompile()
        return graph

    return backend


pair(
    "backend_with_an_approximate_activation",
    CHECK,
    "compiled_code_differs",
    culprits=("encoder",),
    where="torch.compile(model, backend=cheaper",
    faulty=compiling(
        lambda model, compile: torch.compile(model, backend=cheaper("tanh")) if compile else model,
    ),
    fixed=compiling(
        lambda model, compile: torch.compile(model, backend=cheaper("none")) if compile else model,
    ),
)


# The norm of the activations is printed from inside of the model.


class Talking(Classifier):
    def __init__(self, *, inside):
        super().__init__()
        self.inside, self.seen = inside, []

    def forward(self, x):
        features = self.encoder(x)
        if self.inside:
            self.seen.append(features.detach().norm().item())
        return self.head(features)


def talking(*, inside):
    def make(compile=False):
        model = Talking(inside=inside)
        return plain(model, torch.compile(model, backend=BACKEND) if compile else model)

    return make


pair(
    "norm_logged_from_inside_the_graph",
    CHECK,
    "graph_breaks",
    level="advice",
    where="self.seen.append(features.detach().norm().item())",
    faulty=talking(inside=True),
    fixed=talking(inside=False),
    quick=True,
)


# The model counts its calls in a Python number, which every graph compares with.


class Warm(Classifier):
    def __init__(self, *, in_python):
        super().__init__()
        self.in_python, self.calls = in_python, 0

    def forward(self, x, warmth=1.0):
        if self.in_python:
            self.calls += 1
            warmth = min(1.0, self.calls / 100)
        return super().forward(x) * warmth


def warm(*, in_python):
    def make(compile=False):
        model = Warm(in_python=in_python)
        called = torch.compile(model, backend=BACKEND) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for step, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                F.cross_entropy(called(x, torch.tensor(min(1.0, (1 + step) / 100))), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)

    return make


pair(
    "calls_counted_in_a_python_number",
    CHECK,
    "recompilations",
    level="advice",
    faulty=warm(in_python=True),
    fixed=warm(in_python=False),
    quick=True,
)


# Calls counted in a buffer. Up to torch 2.13 the traced backward pass computes the factor again, from the buffer as it
# is after the call: the gradients are those of the next step's factor.


class Counting(Classifier):
    def __init__(self, *, inside):
        super().__init__()
        self.inside = inside
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.inside:
            self.calls += 1
        return super().forward(x) * (self.calls / 100).clamp(max=1.0)


def counting(*, inside):
    def make(compile=False):
        model = Counting(inside=inside)
        called = torch.compile(model, backend=BACKEND) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit(batches):
            for x, y in batches:
                if not inside:
                    model.calls += 1
                optimizer.zero_grad()
                F.cross_entropy(called(x), y).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=batches(), fit=fit)

    return make


pair(
    "buffer_counted_and_read_in_one_graph",
    CHECK,
    "compiled_code_differs",
    where="torch.compile(model, backend=BACKEND)",
    faulty=counting(inside=True),
    fixed=counting(inside=False),
)


# Directions are drawn where they are first needed, and a cache in Python is to keep them.


class Projected(Classifier):
    def __init__(self, *, kept):
        super().__init__()
        self.directions = functools.lru_cache(lambda size: torch.randn(size, size))
        if kept:
            self.register_buffer("matrix", torch.randn(6, 6))
            self.directions = lambda size: self.matrix

    def forward(self, x):
        return super().forward(x + 0.1 * x @ self.directions(6))


pair(
    "random_directions_in_a_cache_of_python",
    CHECK,
    "compiled_code_differs",
    culprits=("randn",),
    faulty=lambda compile=False: _projected(compile, kept=False),
    fixed=lambda compile=False: _projected(compile, kept=True),
)


def _projected(compile, *, kept):
    model = Projected(kept=kept)
    return plain(model, torch.compile(model, backend=BACKEND) if compile else model)


# Where it is compiled, a term of the loss is left out, since it "broke the graph".


class Penalized(Classifier):
    def __init__(self, *, always):
        super().__init__()
        self.always = always

    def forward(self, x):
        features = self.encoder(x)
        if self.always or not torch.compiler.is_compiling():
            features = features / (1 + features.abs().mean(1, keepdim=True))
        return self.head(features)


def penalized(*, always):
    def make(compile=False):
        model = Penalized(always=always)
        return plain(model, torch.compile(model, backend=BACKEND) if compile else model)

    return make


pair(
    "other_features_where_it_is_compiled",
    CHECK,
    "compiled_code_differs",
    where="if self.always or not torch.compiler.is_compiling():",
    culprits=("torch.compiler.is_compiling()",),
    faulty=penalized(always=False),
    fixed=penalized(always=True),
)


# A hook is put on after the compiled model was tried out.


def hooked(*, before):
    def make(compile=False):
        model = Classifier()
        called = torch.compile(model, backend=BACKEND) if compile else model
        if before:
            model.encoder.register_forward_hook(lambda module, args, out: 0.5 * out)
        with torch.no_grad():
            called(torch.zeros(8, 6))
        called(torch.zeros(8, 6)).sum().backward()
        model.zero_grad()
        if not before:
            model.encoder.register_forward_hook(lambda module, args, out: 0.5 * out)
        return plain(model, called)

    return make


pair(
    "hooked_after_the_compiled_model_was_tried_out",
    CHECK,
    "stale_value",
    faulty=hooked(before=False),
    fixed=hooked(before=True),
)
