"""What projects do to a model while it trains: copies, exports, transforms, processes, threads.

Each action is called with the project inside its ``fit``, asserts what it is entitled to, and returns what must be the
same with the plugin as without.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

TOKENS, LENGTH, WIDTH, ROWS = 11, 5, 8, 8


class Net(nn.Module):
    """A small causal language model that can be scripted."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.mix(x).chunk(3, dim=-1)
        x = self.norm(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(torch.tanh(x))


@dataclass
class Project:
    """A trainer with all that it holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    ids: torch.Tensor
    """The inputs of the present batch."""
    labels: torch.Tensor
    batches: Any
    """The loader, of which a trainer keeps hold."""

    def loss(self, model=None):
        return F.cross_entropy((model or self.model)(self.ids).flatten(0, 1), self.labels.flatten())


ACTIONS = {}


def action(group, *, skips=None, raises=""):
    def register(function):
        ACTIONS[function.__name__] = Action(function, group, skips or {}, raises)
        return function

    return register


TWO_OPTIMIZERS = dict.fromkeys(("update_ratio", "overfit_one_batch"), "several losses are backpropagated")


@dataclass
class Action:
    """Something that a project does inside ``fit``."""

    do: Any
    group: str
    skips: dict[str, str]
    """Checks that it truly keeps from a verdict, and a part of the reason that they give."""
    raises: str = ""
    """A part of what torch itself raises in it, in other precisions."""


def same(a, b):
    a, b = a.detach().double(), b.detach().double()
    assert torch.allclose(a, b, rtol=0, atol=0.1 if torch.is_autocast_enabled("cpu") else 1e-4), (a - b).abs().max()
    return a


def same_weights(a, b):
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@action("copies")
def deepcopy_of_the_model(project):
    average = copy.deepcopy(project.model)
    same_weights(average, project.model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in average.modules())
    return same(average(project.ids), project.model(project.ids))


@action("copies")
def copy_of_a_layer(project):
    layer = copy.copy(project.model.head)
    layers = nn.ModuleList(copy.deepcopy(project.model.head) for _ in range(2))
    x = torch.ones(2, WIDTH)
    return same(layer(x), layers[1](x))


@action("copies")
def deepcopy_of_the_optimizer(project):
    other = copy.deepcopy(project.optimizer)
    return len(other.state_dict()["state"])


@action("copies")
def deepcopy_of_the_scheduler(project):
    return copy.deepcopy(project.scheduler).get_last_lr()


@action("copies", skips=TWO_OPTIMIZERS)
def deepcopy_of_the_project(project):
    other = copy.deepcopy(project)
    same_weights(other.model, project.model)
    other.optimizer.zero_grad()
    loss = other.loss()
    loss.backward()
    other.optimizer.step()
    other.scheduler.step()
    return loss.item(), other.scheduler.get_last_lr(), len(other.batches) > 0


@action("copies")
def deepcopy_of_a_loss_with_history(project):
    try:
        copy.deepcopy(project.loss())
    except RuntimeError as error:
        return str(error)[:60]
    return "copied"


@action("copies")
def pickle_of_the_model(project):
    back = pickle.loads(pickle.dumps(project.model))
    same_weights(back, project.model)
    return same(back(project.ids), project.model(project.ids))


@action("copies")
def pickle_of_optimizer_and_state(project):
    optimizer = pickle.loads(pickle.dumps(project.optimizer))
    state = pickle.loads(pickle.dumps(project.scheduler.state_dict()))
    return len(optimizer.param_groups), state["last_epoch"]


@action("copies")
def save_and_load_of_the_model(project):
    file = io.BytesIO()
    torch.save(project.model, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    same_weights(back, project.model)
    return same(back(project.ids), project.model(project.ids))


@action("copies")
def save_and_load_of_states(project):
    file = io.BytesIO()
    torch.save([project.model.state_dict(), project.optimizer.state_dict(), project.model.head.weight], file)
    file.seek(0)
    weights, state, tensor = torch.load(file)
    Net().load_state_dict(weights)
    torch.optim.Adam(Net().parameters()).load_state_dict(state)
    return tensor.detach().clone()


@action("copies")
def averaged_model(project):
    average = torch.optim.swa_utils.AveragedModel(project.model)
    average.update_parameters(project.model)
    return same(average(project.ids), project.model(project.ids))


@action("copies")
def copies_of_the_loader(project):
    loaders = [copy.copy(project.batches), copy.deepcopy(project.batches), pickle.loads(pickle.dumps(project.batches))]
    return [len(loader) == len(project.batches) and len(loader[0]) for loader in loaders]


@action("copies")
def copies_of_tensors(project):
    weight = project.model.head.weight
    leaf = torch.ones(3, requires_grad=True)
    return copy.deepcopy(weight).detach(), copy.copy(leaf).detach(), pickle.loads(pickle.dumps(leaf)).detach()


@action("exports")
def jit_trace(project):
    with torch.autocast("cpu", enabled=False):
        traced = torch.jit.trace(project.model, project.ids)
        return same(traced(project.ids), project.model(project.ids))


@action("exports", raises="Expected a value of type 'Tensor'")
def jit_trace_of_a_function(project):
    traced = torch.jit.trace(lambda x: F.relu(x * 2).sum(-1), torch.ones(2, 3))
    return traced(torch.ones(2, 3))


@action("exports")
def jit_trace_of_a_method(project):
    with torch.autocast("cpu", enabled=False):
        traced = torch.jit.trace_module(project.model, {"forward": project.ids})
        return same(traced(project.ids), project.model(project.ids))


@action("exports")
def jit_script(project):
    scripted = torch.jit.script(project.model)
    return same(scripted(project.ids), project.model(project.ids))


@action("exports")
def jit_freeze(project):
    frozen = torch.jit.freeze(torch.jit.script(copy.deepcopy(project.model).eval()))
    return same(frozen(project.ids), project.model(project.ids))


@action("exports")
def graph_for_a_log(project):
    """What ``SummaryWriter.add_graph`` does."""
    mode = project.model.training
    project.model.eval()
    with torch.autocast("cpu", enabled=False):
        graph = torch.jit.trace(project.model, project.ids, strict=False).graph
    project.model.train(mode)
    return len(list(graph.nodes())) > 3


@action("exports")
def export(project):
    program = torch.export.export(project.model, (project.ids,))
    return same(program.module()(project.ids), project.model(project.ids))


@action("exports")
def export_strict(project):
    program = torch.export.export(project.model, (project.ids,), strict=True)
    return same(program.module()(project.ids), project.model(project.ids))


@action("exports")
def compile_eager(project):
    compiled = torch.compile(project.model, backend="eager")
    return same(compiled(project.ids), project.model(project.ids))


@action("exports")
def compile_aot_eager(project):
    compiled = torch.compile(project.model, backend="aot_eager")
    return same(compiled(project.ids), project.model(project.ids))


@action("exports")
def compile_of_a_function(project):
    @torch.compile(backend="eager", fullgraph=True)
    def square(x):
        return F.relu(x).square().sum()

    return square(project.model.head.weight).item()


@action("exports")
def fx_trace(project):
    graph = torch.fx.symbolic_trace(project.model)
    return same(graph(project.ids), project.model(project.ids)), len(graph.graph.nodes)


@action("exports")
def make_fx(project):
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(project.model)(project.ids)
    return same(graph(project.ids), project.model(project.ids))


@action("exports")
def fake_tensors(project):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.autocast("cpu", enabled=False), FakeTensorMode(allow_non_fake_inputs=True) as mode:  # it keeps weights
        out = project.model(mode.from_tensor(project.ids))
        loss = out.sum()
    return tuple(out.shape), loss.item() if not isinstance(loss, torch.Tensor) else "fake"


@action("exports")
def fake_training_step(project):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        F.cross_entropy(
            model(torch.zeros(2, 3, dtype=torch.long)).flatten(0, 1), torch.zeros(6, dtype=torch.long)
        ).backward()
        optimizer.step()
    return len(optimizer.state)


@action("exports")
def meta_device(project):
    with torch.device("meta"):
        model = Net()
        out = model(torch.zeros(2, 3, dtype=torch.long))
        out.sum().backward()
    return tuple(out.shape), model.to_empty(device="cpu").head.weight.shape


@action("transforms")
def functional_call(project):
    weights = {name: p.detach() * 2 for name, p in project.model.named_parameters()}
    return torch.func.functional_call(project.model, weights, (project.ids,)).detach()


@action("transforms")
def functional_call_and_grad(project):
    weights = {name: p.detach() for name, p in project.model.named_parameters()}

    def loss(weights, ids, labels):
        out = torch.func.functional_call(project.model, weights, (ids,))
        return F.cross_entropy(out.flatten(0, 1), labels.flatten())

    return torch.func.grad(loss)(weights, project.ids, project.labels)["head.weight"]


@action("transforms")
def gradients_of_each_row(project):
    weights = {name: p.detach() for name, p in project.model.named_parameters()}

    def loss(weights, ids, labels):
        out = torch.func.functional_call(project.model, weights, (ids[None],))
        return F.cross_entropy(out[0], labels)

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    return each(weights, project.ids, project.labels)["head.bias"]


@action("transforms")
def vmap(project):
    return same(torch.func.vmap(project.model.head)(torch.ones(4, WIDTH)), project.model.head(torch.ones(4, WIDTH)))


@action("transforms")
def jacobian(project):
    x = torch.ones(2, WIDTH)
    rev, fwd = torch.func.jacrev(project.model.head)(x), torch.func.jacfwd(project.model.head)(x)
    return same(rev, fwd)


@action("transforms")
def hessian_vector_product(project):
    def loss(weight):
        return F.linear(torch.ones(1, WIDTH), weight).pow(3).sum()

    weight = project.model.head.weight.detach()
    return torch.func.jvp(torch.func.grad(loss), (weight,), (torch.ones_like(weight),))[1]


@action("transforms")
def ensemble(project):
    models = [copy.deepcopy(project.model) for _ in range(2)]
    weights, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(project.model).to("meta")

    def one(weights, buffers):
        return torch.func.functional_call(base, (weights, buffers), (project.ids,))

    return torch.func.vmap(one)(weights, buffers).detach()


@action("transforms")
def autograd_jacobian(project):
    return torch.autograd.functional.jacobian(project.model.head, torch.ones(2, WIDTH), vectorize=True)


@action("transforms")
def second_order_gradient(project):
    (first,) = torch.autograd.grad(project.loss(), [project.model.head.weight], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), [project.model.head.bias])
    return second


@action("transforms", skips={"checkpointing_equivalence": ""})
def gradient_checkpoint(project):
    x = torch.ones(2, WIDTH, requires_grad=True)
    out = [checkpoint(project.model.head, x, use_reentrant=reentrant) for reentrant in (True, False)]
    return torch.autograd.grad(out[1].sum(), x)[0]


@action("transforms")
def saved_tensor_hooks(project):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return torch.autograd.grad(project.loss(), [project.model.head.weight])[0]


@action("modules")
def moves_of_the_model(project):
    model = project.model.to("cpu").apply(lambda m: None).float().train()
    assert model is project.model
    return repr(model)


@action("modules")
def other_dtype(project):
    model = copy.deepcopy(project.model).to(torch.bfloat16)
    return model(project.ids).dtype


@action("modules")
def shared_memory(project):
    model = copy.deepcopy(project.model).share_memory()
    return all(p.is_shared() for p in model.parameters())


@action("modules")
def parametrization(project):
    model = copy.deepcopy(project.model).eval()
    nn.utils.parametrizations.weight_norm(model.head)
    nn.utils.parametrizations.spectral_norm(model.mix)
    before = model(project.ids).detach()
    nn.utils.parametrize.remove_parametrizations(model.head, "weight")
    return same(before, model(project.ids)).shape


@action("modules")
def old_weight_norm_and_pruning(project):
    layer = nn.utils.spectral_norm(copy.deepcopy(project.model.head))
    pruned = copy.deepcopy(project.model.mix)
    prune.l1_unstructured(pruned, "weight", 0.5)
    layer(torch.ones(2, WIDTH))
    return (pruned(torch.ones(2, WIDTH)) * 1).detach()


@action("modules")
def hooks_of_the_user(project):
    seen = []
    model = copy.deepcopy(project.model)
    handles = [
        model.head.register_forward_pre_hook(lambda m, args: seen.append("before")),
        model.head.register_forward_hook(lambda m, args, out: seen.append("after")),
        model.head.weight.register_hook(lambda gradient: seen.append("gradient")),
        model.head.register_full_backward_hook(lambda m, given, out: seen.append("backward")),
    ]
    project.loss(model).backward()
    for handle in handles:
        handle.remove()
    assert not model.head._forward_hooks
    assert not model.head._forward_pre_hooks
    return seen


@action("modules")
def hooks_on_the_model_itself(project):
    seen = []
    handle = project.model.head.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)[1:]))
    project.model(project.ids)
    handle.remove()
    assert not project.model.head._forward_hooks
    return seen


@action("modules")
def feature_extractor(project):
    kept = {}
    handle = project.model.norm.register_forward_hook(lambda m, args, out: kept.update(out=out.detach()))
    with torch.no_grad():
        project.model(project.ids)
    handle.remove()
    return kept["out"]


@action("modules")
def global_hooks_of_the_user(project):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    project.model(project.ids)
    handle.remove()
    return seen


@action("modules")
def hook_of_many_gradients(project):
    seen = []
    model = copy.deepcopy(project.model)
    weights = [model.head.weight, model.head.bias]
    handle = torch.autograd.graph.register_multi_grad_hook(weights, lambda grads: seen.append(len(grads)))
    project.loss(model).backward()
    handle.remove()
    return seen


@action("modules")
def data_parallel(project):
    return same(nn.DataParallel(project.model)(project.ids), project.model(project.ids))


@action("modules")
def compiled_in_place(project):
    model = copy.deepcopy(project.model)
    model.compile(backend="eager")
    return same(model(project.ids), project.model(project.ids))


@action("modules")
def own_call(project):
    class Doubled(Net):
        def __call__(self, ids):
            return 2 * super().__call__(ids)

    model = Doubled()
    model.load_state_dict(project.model.state_dict())
    return same(model(project.ids), 2 * project.model(project.ids))


@action("modules")
def replaced_forward(project):
    model = copy.deepcopy(project.model)
    original = model.head.forward
    model.head.forward = lambda x: 2 * original(x)
    return same(model(project.ids), 2 * project.model(project.ids))


@action("modules")
def lazy_layer(project):
    layer = nn.LazyLinear(3)
    torch.manual_seed(0)
    out = layer(torch.ones(2, 4))
    return out.detach()


@action("modules", skips={"precision_parity": "Quantize only works on Float"}, raises="Quantize only works on Float")
def quantized_copy(project):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(project.model).float().eval(), {nn.Linear})
    return type(model.head).__module__


@action("processes")
def fork(project):
    child = os.fork()
    if child == 0:
        try:
            project.model(project.ids).sum().backward()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _count(queue, model, ids):
    torch.set_num_threads(1)
    queue.put(tuple(model(ids).shape))


@action("processes")
def process(project):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_count, args=(queue, project.model, project.ids))
    child.start()
    shape = queue.get()
    child.join()
    return shape, child.exitcode


@action("processes")
def loader_with_workers(project):
    loader = DataLoader(TensorDataset(torch.arange(4)), 2, num_workers=1, multiprocessing_context="fork")
    return [x.tolist() for (x,) in loader]


@action("processes")
def thread(project):
    found = []

    def work():
        with torch.no_grad():
            found.append(project.model(project.ids))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    return same(found[0], project.model(project.ids))


@action("processes", skips=TWO_OPTIMIZERS)
def thread_that_trains(project):
    found = []

    def work():
        model = copy.deepcopy(project.model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = project.loss(model)
        loss.backward()
        optimizer.step()
        found.append(loss.item())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    return found


@action("modes")
def warnings_as_errors(project):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        project.loss()
        project.scheduler.get_last_lr()
        copy.deepcopy(project.model)
        pickle.dumps(project.model)
        torch.save(project.model.head.weight, io.BytesIO())
        try:
            torch.ones(1).std()
        except UserWarning:
            return "raised"
    return "silent"


@action("modes")
def warnings_recorded(project):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.ones(1).std()
        F.softmax(torch.ones(2, 2))
        project.optimizer.zero_grad()
    return [(w.category.__name__, Path(w.filename).name, w.lineno) for w in caught]


@action("modes")
def inference_mode(project):
    with torch.inference_mode():
        return project.model(project.ids).float().numpy().tolist()


@action("modes")
def mode_of_the_user(project):
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        project.model(project.ids)
    return counting.calls


@action("modes")
def dispatch_mode_of_the_user(project):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        project.model(project.ids[:1])
    return counter.get_total_flops()


@action("modes")
def tensor_subclass(project):
    class Tagged(torch.Tensor):
        pass

    out = project.model.head(torch.ones(2, WIDTH).as_subclass(Tagged))
    return type(out).__name__, out.detach().as_subclass(torch.Tensor)


@action("modes")
def profiler(project):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        project.model(project.ids)
    return len(profile.key_averages()) > 0


@action("modes")
def anomaly_mode(project):
    with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
        return torch.autograd.grad(project.loss(), [project.model.head.bias])[0]


@action("modes")
def autocast(project):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return project.model(project.ids).dtype in (torch.bfloat16, torch.float64)
