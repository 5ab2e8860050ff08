"""Names, copies and steps that are others once the model is compiled."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


class Encoder(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.patch = nn.Linear(9, 16)
        self.pos_embed = nn.Parameter(torch.randn(16) * 0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x) + self.pos_embed
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


CLIPPED = {"patch", "pos_embed", "blocks"}


def images(rows: int = 8, classes: int = 4):
    return torch.randn(rows, 9), torch.randint(classes, (rows,))


def epoch(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@fault(
    "copies",
    "names of the compiled model begin with _orig_mod., so that nothing is frozen",
    thread="huggingface/pytorch-image-models#2003",
    check="compile_parity",
    place='name.startswith("patch.")',
)
def frozen_by_prefix(compile=False):
    model = Encoder()
    if compile:
        model = torch.compile(model, backend="aot_eager")
    for name, parameter in model.named_parameters():
        if name.startswith("patch.") or name.startswith("blocks.0"):
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(model, optimizer, bs))


def layer_of(name: str, depth: int) -> int:
    if name in ("pos_embed",) or name.startswith("patch"):
        return 0
    if name.startswith("blocks"):
        return int(name.split(".")[1]) + 1
    return depth + 1


@fault(
    "copies",
    "layer-wise rates are looked up by names that the compiled model does not have: all get the head's",
    thread="pytorch/torchtitan#2859",
    check="compile_parity",
    place="layer_of(name, depth)",
)
def layerwise_rates(compile=False, decay=0.3):
    model = Encoder()
    model = torch.compile(model, backend="aot_eager") if compile else model
    depth = len(model.blocks)
    groups = {}
    for name, p in model.named_parameters():
        layer = layer_of(name, depth)
        groups.setdefault(layer, {"params": [], "lr": 0.1 * decay ** (depth + 1 - layer)})["params"].append(p)
    optimizer = torch.optim.SGD(list(groups.values()))
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(model, optimizer, bs))


@fault(
    "copies",
    "the pretrained weights are loaded into the compiled model without strict: no key fits",
    thread="mlfoundations/open_clip#639",
    check="compile_parity",
    place="strict=False",
)
def pretrained_not_strict(compile=False):
    source = Encoder()
    pretrained = {f"module.{k}": v.clone() for k, v in source.state_dict().items() if not k.startswith("head")}
    model = Encoder()
    runner = torch.compile(model, backend="aot_eager") if compile else model
    cleaned = {k.removeprefix("module."): v for k, v in pretrained.items()}
    runner.load_state_dict(cleaned, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(runner, optimizer, bs))


class ExponentialAverage:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.shadow = copy.deepcopy(model).requires_grad_(False)
        self.by_name = dict(self.shadow.named_parameters())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            if name in self.by_name:
                self.by_name[name].lerp_(value, 1 - self.decay)


@fault(
    "copies",
    "the teacher is updated by name, and no name of the compiled student is among its own",
    thread="wandb/senpai#2899",
    check="compile_parity",
    place="if name in self.by_name:",
)
def mean_teacher(compile=False):
    student = Encoder()
    ema = ExponentialAverage(student, decay=0.5)
    run = torch.compile(student, backend="aot_eager") if compile else student
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2)

    def train(batches):
        for x, y in batches:
            logits = run(x)
            loss = F.cross_entropy(logits, y) + F.mse_loss(logits, ema.shadow(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(run)

    return TrainLoop(
        model={"student": student, "teacher": ema.shadow},
        optimizer=optimizer,
        batch=images(),
        fit=train,
        frozen=("teacher.",),
    )


@fault(
    "copies",
    "a copy is compiled and called, and the optimizer steps the model that it was copied from",
    thread="deepmodeling/deepmd-kit#5818",
    check="compile_parity",
    place="copy.deepcopy(model)",
)
def compiled_copy(compile=False):
    model = Encoder(classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_model = torch.compile(copy.deepcopy(model), backend="aot_eager") if compile else model
    return TrainLoop(
        model=model, optimizer=optimizer, batch=images(8, 3), fit=lambda bs: epoch(step_model, optimizer, bs)
    )


@dataclass
class Settings:
    classes: int = 5
    lr: float = 0.05
    compile: bool = False


class Engine:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = Encoder(settings.classes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=settings.lr, momentum=0.9)
        if settings.compile:
            self.prepare()

    def prepare(self) -> None:
        example = torch.zeros(8, 9)
        self.model = torch.compile(self.model, backend="aot_eager")
        F.cross_entropy(self.model(example), torch.zeros(8, dtype=torch.long)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fit(self, batches) -> None:
        epoch(self.model, self.optimizer, batches)


@fault(
    "copies",
    "the warm-up makes a real optimizer step on a dummy batch",
    thread="huggingface/optimum-intel#1189",
    check="compile_parity",
    place="self.optimizer.step()",
)
def warmup_step(compile=False):
    engine = Engine(Settings(compile=compile))
    return TrainLoop(model=engine.model, optimizer=engine.optimizer, batch=images(8, 5), fit=engine.fit)


class SegmentNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 16), nn.ReLU())
        self.main, self.aux = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor):
        h = self.body(x)
        return self.main(h), self.aux(h)


def plain_loss(outputs, y):
    return F.cross_entropy(outputs[0], y)


def auxiliary_loss(outputs, y):
    return F.cross_entropy(outputs[0], y) + 0.4 * F.cross_entropy(outputs[1], y)


LOSSES = {SegmentNet: auxiliary_loss}


@fault(
    "copies",
    "the loss is chosen by the model's type, which is another one for the compiled model",
    thread="skorch-dev/skorch#1058",
    check="compile_parity",
    place="LOSSES.get(type(model), plain_loss)",
)
def loss_by_type(compile=False):
    model = SegmentNet()
    if compile:
        model = torch.compile(model, backend="aot_eager")
    criterion = LOSSES.get(type(model), plain_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@fault(
    "copies",
    "batches are filled up to a fixed size for the graph, and the rows that fill them count in the mean",
    thread="pytorch/pytorch#188150",
    check="compile_parity",
    place="F.pad",
)
def fixed_shapes(compile=False, size=12):
    model = Encoder()
    forward = torch.compile(model, backend="aot_eager", dynamic=False) if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def collate(x, y):
        if compile and len(x) < size:
            missing = size - len(x)
            x, y = F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, missing))
        return x, y

    def train(batches):
        for batch in batches:
            x, y = collate(*batch)
            optimizer.zero_grad()
            F.cross_entropy(forward(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@fault(
    "copies",
    "the compiled step runs backward itself, and the loop calls it again on the loss that it returns",
    thread="tenstorrent/tt-blacksmith#627",
    check="compile_parity",
    place="scaled.backward(retain_graph=compile)",
)
def step_with_backward(compile=False):
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def training_step(x, y):
        return F.cross_entropy(model(x), y)

    def whole_step(x, y):
        loss = training_step(x, y)
        loss.backward(retain_graph=True)
        return loss

    step = torch.compile(whole_step, backend="aot_eager") if compile else training_step

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            scaled = step(x, y)
            scaled.backward(retain_graph=compile)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@fault(
    "copies",
    "the compiled step zeroes gradients before each micro-batch, so that only the last one counts",
    thread="pytorch/pytorch#120814",
    check="compile_parity",
    place="optimizer.zero_grad(set_to_none=True)",
)
def micro_batches(compile=False, micro=2):
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward_backward(x, y):
        loss = F.cross_entropy(model(x), y) / micro
        loss.backward()
        return loss.detach()

    def compiled_forward_backward(x, y):
        optimizer.zero_grad(set_to_none=True)
        return forward_backward(x, y)

    run = torch.compile(compiled_forward_backward, backend="aot_eager") if compile else forward_backward

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad(set_to_none=True)
            for a, b in zip(x.chunk(micro), y.chunk(micro), strict=True):
                run(a, b)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


def smooth_loss(logits, y):
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def fast_loss(logits, y):
    picked = logits.gather(1, y[:, None])[:, 0]
    return (torch.logsumexp(logits, 1) - picked).mean()


@fault(
    "copies",
    "the loss that is compiled is a plainer one, without the smoothing",
    thread="the-database/traiNNer-redux#289",
    check="compile_parity",
    place="torch.compile(fast_loss",
)
def two_losses(compile=False):
    model = Encoder()
    criterion = torch.compile(fast_loss, backend="aot_eager") if compile else smooth_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        for x, y in batches:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)


@fault(
    "copies",
    "the model is put in evaluation mode to be traced, and stays there",
    thread="JIA-Lab-research/LongLoRA#127",
    check="compile_parity",
    place="model.eval()",
)
def eval_for_tracing(compile=False):
    model = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    forward = model
    if compile:
        model.eval()
        forward = torch.compile(model, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            forward(torch.zeros(8, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=lambda bs: epoch(forward, optimizer, bs))


class Rotary(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(6, dim), nn.Linear(dim, 3)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x)
        if self.table is None or len(self.table) < x.shape[1]:
            position = torch.arange(x.shape[1], dtype=q.dtype)[:, None]
            self.table = torch.cos(position / 10 ** torch.arange(q.shape[-1], dtype=q.dtype).div(8))
        return self.out((q * self.table[: x.shape[1]]).mean(1))


@fault(
    "copies",
    "the compiled model is warmed up in inference mode, and the table that it caches there cannot be used in training",
    thread="Dao-AILab/flash-attention#299",
    check="compile_parity",
    place="torch.inference_mode()",
)
def cached_table(compile=False):
    model = Rotary()
    forward = model
    if compile:
        forward = torch.compile(model, backend="aot_eager")
        with torch.inference_mode():
            forward(torch.zeros(8, 5, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(8, 5, 6), torch.randint(3, (8,)))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: epoch(forward, optimizer, bs))


@fault(
    "copies",
    "the checkpoint has the compiled model's keys and is loaded without strict into the raw one: weights begin anew",
    thread="FareedKhan-dev/train-llm-from-scratch#37",
    check="compile_parity",
    place="strict=False",
)
def resumed_without_strict(compile=False):
    raw = Encoder()
    model = torch.compile(raw, backend="aot_eager") if compile else raw
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)

    def save_checkpoint(path):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load_checkpoint(path):
        state = torch.load(path)
        raw.load_state_dict({k.replace("module.", ""): v for k, v in state["model"].items()}, strict=False)
        optimizer.load_state_dict(state["optimizer"])

    return TrainLoop(
        model=raw,
        optimizer=optimizer,
        batch=images(),
        fit=lambda bs: epoch(model, optimizer, bs),
        save=save_checkpoint,
        load=load_checkpoint,
    )


@fault(
    "copies",
    "the norm is clipped over the weights by their names, and the compiled model has none of these",
    thread="kohya-ss/sd-scripts#1024",
    check="compile_parity",
    place="in CLIPPED",
)
def clipped_by_name(compile=False):
    model = Encoder()
    run = torch.compile(model, backend="aot_eager") if compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(run(x), y).backward()
            trunk = [p for name, p in run.named_parameters() if name.split(".")[0] in CLIPPED]
            nn.utils.clip_grad_norm_(trunk, 0.05)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batch=images(), fit=train)
