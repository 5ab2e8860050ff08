"""Loops whose resumed run is another than the uninterrupted one."""

from __future__ import annotations

import copy
import math
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def classified(batches=8, rows=8, features=12, classes=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=g)
    out = []
    for _ in range(batches):
        y = torch.randint(classes, (rows,), generator=g)
        out.append((centres[y] + 0.7 * torch.randn(rows, features, generator=g), y))
    return out


def images(batches=8, rows=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(rows, 16, generator=g) for _ in range(batches)]


def tokens(batches=8, rows=4, length=10, vocab=24, seed=2):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (rows, length), generator=g) for _ in range(batches)]


def mlp(features=12, hidden=24, classes=4):
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


@fault(
    "checkpoints",
    "the checkpoint has no optimizer state: Adam's moments begin anew",
    thread="CSAILVision/places365#78",
    check="resume_equivalence",
)
def segmentation_script():
    encoder = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())
    decoder = nn.Conv2d(6, 3, 1)
    params = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(params, lr=5e-3)
    history = {"train": {"epoch": [], "loss": []}}

    def train(batches):
        encoder.train()
        decoder.train()
        for i, (img, mask) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(decoder(encoder(img)), mask)
            loss.backward()
            optimizer.step()
            history["train"]["epoch"].append(i)
            history["train"]["loss"].append(loss.item())

    def checkpoint(path):
        torch.save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict(), "history": history}, path)

    def resume(path):
        saved = torch.load(path)
        encoder.load_state_dict(saved["encoder"])
        decoder.load_state_dict(saved["decoder"])
        history.update(saved["history"])

    g = torch.Generator().manual_seed(3)
    data = [(torch.rand(4, 1, 8, 8, generator=g), torch.randint(3, (4, 8, 8), generator=g)) for _ in range(6)]
    return TrainLoop(
        model={"encoder": encoder, "decoder": decoder},
        optimizer=optimizer,
        batches=data,
        fit=train,
        save=checkpoint,
        load=resume,
    )


@fault(
    "checkpoints",
    "the scheduler is not in the checkpoint: warm-up and decay start again",
    thread="lightly-ai/lightly-train#301",
    check="resume_equivalence",
)
def adamw_warmup():
    class Trainer:
        def __init__(self):
            self.model = mlp()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.01)
            self.scheduler = LambdaLR(self.optimizer, self.factor)

        @staticmethod
        def factor(step):
            if step < 5:
                return (step + 1) / 5
            return max(0.0, 1 - (step - 5) / 40) ** 0.9

        def fit(self, batches):
            self.model.train()
            for x, y in batches:
                self.optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.scheduler.step()

        def save(self):
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

        def load(self, state):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    t = Trainer()
    return TrainLoop(
        model=t.model,
        optimizer=t.optimizer,
        scheduler=t.scheduler,
        batches=classified(),
        fit=t.fit,
        save=t.save,
        load=t.load,
    )


@fault(
    "checkpoints",
    "the state is captured before scheduler.step(): the scheduler resumes one step behind",
    thread="allenai/allennlp#1650",
    check="resume_equivalence",
)
def sentence_classifier():
    model = nn.Sequential(nn.Embedding(24, 12), nn.Flatten(), nn.Linear(120, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    last = {}

    def training_state():
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }

    def train(batches):
        for ids, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(ids), labels).backward()
            optimizer.step()
            last["state"] = copy.deepcopy(training_state())
            scheduler.step()

    def restore(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    data = [(ids, ids[:, 0] % 3) for ids in tokens()]
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=data,
        fit=train,
        save=lambda path: torch.save(last["state"], path),
        load=restore,
    )


class EMA:
    def __init__(self, model, decay=0.95):
        self.decay = decay
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.updates = 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = self.decay * (1 - math.exp(-self.updates / 10))
        for e, p in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if e.dtype.is_floating_point:
                e.mul_(d).add_(p.detach(), alpha=1 - d)


@fault(
    "checkpoints",
    "the EMA model is not saved: after a resume it is the average of the initial weights",
    thread="ai2cm/ace#349",
    check="resume_equivalence",
)
def emulator():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    ema = EMA(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(batches):
        model.train()
        for x in batches:
            loss = F.mse_loss(model(x), x.roll(1, dims=1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)

    def save():
        return {"module": model.state_dict(), "optimization": optimizer.state_dict()}

    def load(state):
        model.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimization"])

    return TrainLoop(
        model={"model": model, "ema": ema.module},
        optimizer=optimizer,
        batches=images(),
        fit=train,
        evaluate=lambda: float(F.mse_loss(ema.module(images()[0]), images()[0])),
        save=save,
        load=load,
    )


@fault(
    "checkpoints",
    "only the EMA's weights are saved, and the model is loaded from them",
    thread="Megvii-BaseDetection/YOLOX#1318",
    check="resume_equivalence",
)
def yolox_head():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.bn = nn.BatchNorm2d(8)
            self.cls = nn.Conv2d(8, 2, 1)
            self.reg = nn.Conv2d(8, 4, 1)

        def forward(self, x):
            h = F.silu(self.bn(self.stem(x)))
            return {"cls": self.cls(h), "reg": self.reg(h)}

    class Trainer:
        def __init__(self):
            self.model = Head()
            self.ema_model = EMA(self.model, 0.99)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, nesterov=True)

        def train_one_iter(self, batch):
            out = self.model(batch["images"])
            loss = F.cross_entropy(out["cls"], batch["cls"]) + F.l1_loss(out["reg"], batch["reg"])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.ema_model.update(self.model)

        def train(self, batches):
            self.model.train()
            for batch in batches:
                self.train_one_iter(batch)

        def save_ckpt(self, path):
            save_model = self.ema_model.module
            torch.save({"model": save_model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)

        def resume_train(self, path):
            ckpt = torch.load(path, map_location="cpu")
            self.model.load_state_dict(ckpt["model"])
            self.optimizer.load_state_dict(ckpt["optimizer"])
            self.ema_model.module.load_state_dict(ckpt["model"])

    g = torch.Generator().manual_seed(4)
    data = [
        {
            "images": torch.rand(4, 3, 6, 6, generator=g),
            "cls": torch.randint(2, (4, 6, 6), generator=g),
            "reg": torch.rand(4, 4, 6, 6, generator=g),
        }
        for _ in range(6)
    ]
    t = Trainer()
    return TrainLoop(
        model={"model": t.model, "ema": t.ema_model.module},
        optimizer=t.optimizer,
        batches=data,
        fit=t.train,
        save=t.save_ckpt,
        load=t.resume_train,
    )


@fault(
    "checkpoints",
    "the GradScaler is not in the checkpoint: the scale starts at its first value again",
    thread="pytorch/vision#4923",
    check="resume_equivalence",
)
def amp_reference_script():
    model = mlp(hidden=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=50)

    def train_one_epoch(batches):
        model.train()
        for image, target in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(image), target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    def load(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        batches=classified(),
        fit=train_one_epoch,
        save=lambda path: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@fault(
    "checkpoints",
    "the snapshot kept in memory holds the live weights, not a copy: it moves on with the training",
    thread="WenjieDu/PyPOTS#667",
    check="resume_equivalence",
)
def series_regressor():
    class Snapshots:
        """The last good states, in memory: training returns to one where it diverges."""

        def __init__(self, model, optimizer, keep=3):
            self.model, self.optimizer = model, optimizer
            self.kept = deque(maxlen=keep)

        def take(self):
            self.kept.append(
                {"weights": dict(self.model.state_dict()), "optimizer": copy.deepcopy(self.optimizer.state_dict())}
            )
            return self.kept[-1]

        def back_to(self, snapshot):
            self.model.load_state_dict(snapshot["weights"])
            self.optimizer.load_state_dict(snapshot["optimizer"])

    model = nn.GRU(8, 12, batch_first=True)
    head = nn.Linear(12, 1)
    both = nn.ModuleDict({"rnn": model, "head": head})
    optimizer = torch.optim.Adam(both.parameters(), lr=1e-2)
    snapshots = Snapshots(both, optimizer)

    def train(batches):
        for series, value in batches:
            loss = F.mse_loss(head(model(series)[0][:, -1]).squeeze(-1), value)
            if not torch.isfinite(loss):
                snapshots.back_to(snapshots.kept[-1])
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    g = torch.Generator().manual_seed(5)
    data = [(torch.randn(6, 5, 8, generator=g), torch.randn(6, generator=g)) for _ in range(6)]
    return TrainLoop(
        model=both, optimizer=optimizer, batches=data, fit=train, save=snapshots.take, load=snapshots.back_to
    )


@fault(
    "checkpoints",
    "the keys have the prefix module. and strict=False skips them all: no weight is loaded",
    thread="pytorch/examples#1029",
    check="resume_equivalence",
)
def data_parallel():
    net = mlp()
    parallel = nn.DataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def train(batches):
        parallel.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(parallel(x), y).backward()
            optimizer.step()

    def load(path):
        ckpt = torch.load(path)
        net.load_state_dict(ckpt["state_dict"], strict=False)
        optimizer.load_state_dict(ckpt["optimizer"])

    return TrainLoop(
        model=net,
        optimizer=optimizer,
        batches=classified(),
        fit=train,
        save=lambda path: torch.save({"state_dict": parallel.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@fault(
    "checkpoints",
    "the groups of unfrozen layers are added in another order on resume: momenta of layer1 and layer2 are swapped",
    thread="technicolor-research/dsve-loc#16",
    check="resume_equivalence",
)
def gradual_unfreezing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1 = nn.Linear(16, 16)
            self.layer2 = nn.Linear(16, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.layer2(torch.tanh(self.layer1(x)))))

    class Finetuner:
        def __init__(self):
            self.net = Net()
            self.optimizer = torch.optim.Adam(self.net.head.parameters(), lr=1e-2)
            self.stage = 0
            for layer in (self.net.layer1, self.net.layer2):
                layer.requires_grad_(False)

        def unfreeze(self, name):
            layer = getattr(self.net, name)
            layer.requires_grad_(True)
            self.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 2e-3})
            self.stage += 1

        def fit(self, batches):
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.net(x), y).backward()
                self.optimizer.step()
                if self.stage < 2:
                    self.unfreeze(("layer2", "layer1")[self.stage])

        def save(self):
            return {"net": self.net.state_dict(), "opt": self.optimizer.state_dict(), "stage": self.stage}

        def load(self, ckpt):
            if self.stage == 0:
                for name in ("layer1", "layer2")[: ckpt["stage"]]:
                    self.unfreeze(name)
            self.net.load_state_dict(ckpt["net"])
            self.optimizer.load_state_dict(ckpt["opt"])

    f = Finetuner()
    return TrainLoop(
        model=f.net,
        optimizer=f.optimizer,
        batches=classified(features=16, seed=6),
        fit=f.fit,
        save=f.save,
        load=f.load,
    )


class TinyLM(nn.Module):
    def __init__(self, vocab=24, width=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        return self.lm_head(self.rnn(self.wte(ids))[0])

    def loss(self, ids):
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@fault(
    "checkpoints",
    "lm_head.weight is a parameter of its own after loading: it is untied from wte.weight",
    thread="NVIDIA-NeMo/Automodel#2571",
    check="resume_equivalence",
)
def lm_recipe():
    class Recipe:
        def __init__(self):
            self.model = TinyLM()
            self.build_optimizer()

        def build_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def train(self, batches):
            for ids in batches:
                self.optimizer.zero_grad()
                self.model.loss(ids).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()

        def save(self, path):
            torch.save(self.model.state_dict(), path)

        def load(self, path):
            for name, value in torch.load(path).items():
                owner, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(owner), leaf, nn.Parameter(value.clone()))
            self.build_optimizer()

    r = Recipe()
    return TrainLoop(model=r.model, batches=tokens(), fit=r.train, save=r.save, load=r.load)


@fault(
    "checkpoints",
    "load_state_dict(assign=True) replaces the parameters: the optimizer steps the old ones",
    thread="pytorch/tutorials#2522",
    check="resume_equivalence",
)
def mmap_loading():
    with torch.device("cpu"):
        model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(batches):
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def load(path):
        state = torch.load(path, mmap=True, map_location="cpu")
        model.load_state_dict(state["model"], assign=True)
        optimizer.load_state_dict(state["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(),
        fit=train,
        save=lambda path: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@fault(
    "checkpoints",
    "the centre of the DINO loss is a plain attribute, no buffer: it is zero again after a resume",
    thread="facebookresearch/vissl#436",
    check="resume_equivalence",
)
def dino():
    class DINOLoss(nn.Module):
        def __init__(self, out_dim):
            super().__init__()
            self.center = torch.zeros(1, out_dim)

        def forward(self, student, teacher):
            target = ((teacher - self.center) / 0.1).softmax(-1).detach()
            loss = -(target * F.log_softmax(student / 0.2, -1)).sum(-1).mean()
            self.center = 0.8 * self.center + 0.2 * teacher.detach().mean(0, keepdim=True)
            return loss

    student = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 10))
    teacher = copy.deepcopy(student).requires_grad_(False)
    criterion = DINOLoss(10)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)

    def train(batches):
        for x in batches:
            loss = criterion(student(x * 0.9), teacher(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
                    t.lerp_(s, 0.1)

    parts = {"student": student, "teacher": teacher, "optimizer": optimizer, "loss": criterion}

    def load(path):
        for name, saved in torch.load(path).items():
            parts[name].load_state_dict(saved)

    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batches=images(),
        fit=train,
        save=lambda path: torch.save({k: v.state_dict() for k, v in parts.items()}, path),
        load=load,
    )


@fault(
    "checkpoints",
    "the memory bank is a non-persistent buffer: the queue is the initial one after a resume",
    thread="lightly-ai/lightly#993",
    check="resume_equivalence",
)
def nnclr():
    class NNCLR(nn.Module):
        def __init__(self, size=32, dim=8):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, dim))
            self.register_buffer("bank", F.normalize(torch.randn(size, dim), dim=1), persistent=False)
            self.register_buffer("bank_ptr", torch.zeros((), dtype=torch.long), persistent=False)

        @torch.no_grad()
        def push(self, z):
            ptr = int(self.bank_ptr)
            at = (ptr + torch.arange(len(z))) % len(self.bank)
            self.bank[at] = z
            self.bank_ptr.fill_((ptr + len(z)) % len(self.bank))

        def forward(self, a, b):
            za, zb = F.normalize(self.backbone(a), dim=1), F.normalize(self.backbone(b), dim=1)
            nearest = self.bank[(za @ self.bank.T).argmax(1)]
            loss = F.cross_entropy(nearest @ zb.T / 0.2, torch.arange(len(a)))
            self.push(zb.detach())
            return loss

    model = NNCLR()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(batches):
        for x in batches:
            optimizer.zero_grad()
            model(x, x.flip(1)).backward()
            optimizer.step()

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=images(),
        fit=train,
        save=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        load=load,
    )


class LoRALinear(nn.Module):
    def __init__(self, fan_in, fan_out, rank=2):
        super().__init__()
        g = torch.Generator().manual_seed(fan_in * 100 + fan_out)
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in, generator=g) / fan_in**0.5, requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(rank, fan_in) / fan_in**0.5)
        self.lora_B = nn.Parameter(torch.zeros(fan_out, rank))

    def forward(self, x):
        return F.linear(x, self.weight) + x @ self.lora_A.T @ self.lora_B.T


@fault(
    "checkpoints",
    "only the lora_ tensors are saved: the trained classifier head is lost",
    thread="huggingface/sentence-transformers#3980",
    check="resume_equivalence",
)
def lora_classifier():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = LoRALinear(12, 16)
            self.value = LoRALinear(16, 16)
            self.classifier = nn.Linear(16, 4)

        def forward(self, x):
            return self.classifier(torch.relu(self.value(torch.relu(self.query(x)))))

    model = Encoder()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)

    def train(batches):
        model.train()
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def save(path):
        adapter = {k: v for k, v in model.state_dict().items() if "lora_" in k}
        torch.save({"adapter": adapter, "optimizer": optimizer.state_dict()}, path)

    def load(path):
        ckpt = torch.load(path)
        model.load_state_dict(ckpt["adapter"], strict=False)
        optimizer.load_state_dict(ckpt["optimizer"])

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        frozen=("query.weight", "value.weight"),
        batches=classified(),
        fit=train,
        save=save,
        load=load,
    )


@fault(
    "checkpoints",
    "the optimizer is built again after its state was loaded: the state is erased",
    thread="OpenNMT/OpenNMT-py#617",
    check="resume_equivalence",
)
def opennmt_optim():
    class Optim:
        def __init__(self, method, lr):
            self.method, self.lr = method, lr
            self.optimizer = None

        def set_parameters(self, params):
            self.optimizer = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[self.method](
                [p for p in params if p.requires_grad], lr=self.lr
            )

    model = TinyLM()
    optim = Optim("adam", 5e-3)

    def build_optim(checkpoint=None):
        if checkpoint is not None:
            optim.lr = checkpoint["lr"]
            optim.set_parameters(model.parameters())
            optim.optimizer.load_state_dict(checkpoint["optim"])
        optim.set_parameters(model.parameters())

    build_optim()

    def train(batches):
        for ids in batches:
            optim.optimizer.zero_grad()
            model.loss(ids).backward()
            optim.optimizer.step()

    def load(checkpoint):
        model.load_state_dict(checkpoint["model"])
        build_optim(checkpoint)

    return TrainLoop(
        model=model,
        batches=tokens(),
        fit=train,
        save=lambda: {"model": model.state_dict(), "optim": optim.optimizer.state_dict(), "lr": optim.lr},
        load=load,
    )


@fault(
    "checkpoints",
    "global_step is not saved: the weight of the KL term is annealed from zero again",
    thread="JiahuiYu/generative_inpainting#466",
    check="resume_equivalence",
)
def annealed_vae():
    @dataclass
    class State:
        global_step: int = 0
        losses: list = field(default_factory=list)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Linear(16, 2 * 4)
            self.dec = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))

        def forward(self, x, eps):
            mu, logvar = self.enc(x).chunk(2, -1)
            kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(-1).mean()
            return self.dec(mu + eps * (0.5 * logvar).exp()), kl

    model, state = VAE(), State()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train(batches):
        for x, eps in batches:
            beta = min(1.0, state.global_step / 10)
            recon, kl = model(x, eps)
            loss = F.mse_loss(recon, x, reduction="sum") / len(x) + beta * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.global_step += 1
            state.losses.append(loss.item())

    def load(path):
        ckpt = torch.load(path)
        model.load_state_dict(ckpt["vae"])
        optimizer.load_state_dict(ckpt["optimizer"])

    g = torch.Generator().manual_seed(8)
    data = [(x, torch.randn(len(x), 4, generator=g)) for x in images()]
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=data,
        fit=train,
        save=lambda path: torch.save({"vae": model.state_dict(), "optimizer": optimizer.state_dict()}, path),
        load=load,
    )


def transitions(batches=8, rows=16, seed=9):
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "obs": torch.randn(rows, 6, generator=g),
            "action": torch.randint(3, (rows,), generator=g),
            "reward": torch.randn(rows, generator=g),
            "next_obs": torch.randn(rows, 6, generator=g),
            "done": (torch.rand(rows, generator=g) < 0.1).float(),
        }
        for _ in range(batches)
    ]


def q_net():
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))


@fault(
    "checkpoints",
    "the target network is not saved: it is set to the online network on load",
    thread="google-deepmind/open_spiel#1620",
    check="resume_equivalence",
)
def dqn_agent():
    class DQN:
        def __init__(self, update_target_every=6):
            self.q, self.target = q_net(), q_net()
            self.target.load_state_dict(self.q.state_dict())
            self.optimizer = torch.optim.Adam(self.q.parameters(), lr=5e-3)
            self.every, self.step_counter = update_target_every, 0

        def learn(self, t):
            with torch.no_grad():
                best = t["reward"] + 0.9 * (1 - t["done"]) * self.target(t["next_obs"]).max(1).values
            q = self.q(t["obs"]).gather(1, t["action"][:, None]).squeeze(1)
            self.optimizer.zero_grad()
            F.smooth_l1_loss(q, best).backward()
            self.optimizer.step()
            self.step_counter += 1
            if self.step_counter % self.every == 0:
                self.target.load_state_dict(self.q.state_dict())

        def save(self):
            return {"q": self.q.state_dict(), "optimiser": self.optimizer.state_dict(), "steps": self.step_counter}

        def load(self, data):
            self.q.load_state_dict(data["q"])
            self.target.load_state_dict(data["q"])
            self.optimizer.load_state_dict(data["optimiser"])
            self.step_counter = data["steps"]

    agent = DQN()
    return TrainLoop(
        model={"q": agent.q, "target": agent.target},
        optimizer=agent.optimizer,
        batches=transitions(),
        fit=lambda batches: [agent.learn(t) for t in batches] and None,
        save=agent.save,
        load=agent.load,
    )


@fault(
    "checkpoints",
    "the replay buffer is not saved: the resumed agent learns from an empty one",
    thread="nicklashansen/tdmpc2#28",
    check="resume_equivalence",
)
def off_policy_agent():
    class Replay:
        def __init__(self, capacity=96, seed=0):
            self.items, self.capacity = [], capacity
            self.rng = torch.Generator().manual_seed(seed)

        def add(self, rollout):
            rows = [dict(zip(rollout, r, strict=True)) for r in zip(*rollout.values(), strict=True)]
            self.items = (self.items + rows)[-self.capacity :]

        def sample(self, n=16):
            at = torch.randint(len(self.items), (n,), generator=self.rng).tolist()
            return {k: torch.stack([self.items[i][k] for i in at]) for k in self.items[0]}

    actor = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    critic = q_net()
    pi_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    buffer = Replay()

    def train(batches):
        for rollout in batches:
            buffer.add(rollout)
            t = buffer.sample()
            value = critic(t["obs"])
            taken = value.gather(1, t["action"][:, None]).squeeze(1)
            optimizer.zero_grad()
            F.mse_loss(taken, t["reward"]).backward()
            optimizer.step()
            pi_optimizer.zero_grad()
            (-(actor(t["obs"]).softmax(-1) * critic(t["obs"]).detach()).sum(-1).mean()).backward()
            pi_optimizer.step()

    modules = {"actor": actor, "critic": critic, "pi_optimizer": pi_optimizer, "optimizer": optimizer}

    def save(path):
        torch.save({**{k: m.state_dict() for k, m in modules.items()}, "rng": buffer.rng.get_state()}, path)

    def load(path):
        saved = torch.load(path)
        buffer.rng.set_state(saved.pop("rng"))
        for k, s in saved.items():
            modules[k].load_state_dict(s)

    return TrainLoop(
        model={"actor": actor, "critic": critic},
        optimizer=[pi_optimizer, optimizer],
        batches=transitions(),
        fit=train,
        save=save,
        load=load,
    )


@fault(
    "checkpoints",
    "the running mean and variance of the observations are not saved with the policy",
    thread="DLR-RM/rl-baselines3-zoo#386",
    check="resume_equivalence",
)
def policy_gradient():
    class RunningMeanStd:
        def __init__(self, shape):
            self.mean, self.var, self.count = torch.zeros(shape), torch.ones(shape), 1e-4

        def update(self, x):
            mean, var, n = x.mean(0), x.var(0, unbiased=False), len(x)
            delta, total = mean - self.mean, self.count + n
            m2 = self.var * self.count + var * n + delta**2 * self.count * n / total
            self.mean, self.var, self.count = self.mean + delta * n / total, m2 / total, total

        def __call__(self, x):
            return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-5, 5)

    policy = q_net()
    obs_rms = RunningMeanStd(6)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def learn(batches):
        for roll in batches:
            obs_rms.update(3 + 2 * roll["obs"])
            logp = F.log_softmax(policy(obs_rms(3 + 2 * roll["obs"])), -1)
            adv = roll["reward"] - roll["reward"].mean()
            loss = -(logp.gather(1, roll["action"][:, None]).squeeze(1) * adv).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def load(path):
        data = torch.load(path)
        policy.load_state_dict(data["policy"])
        optimizer.load_state_dict(data["policy.optimizer"])

    return TrainLoop(
        model=policy,
        optimizer=optimizer,
        batches=transitions(seed=10),
        fit=learn,
        save=lambda path: torch.save({"policy": policy.state_dict(), "policy.optimizer": optimizer.state_dict()}, path),
        load=load,
    )


@fault(
    "checkpoints",
    "netG_B is loaded from the entry of netG_A",
    thread="junyanz/pytorch-CycleGAN-and-pix2pix#1380",
    check="resume_equivalence",
)
def cyclegan():
    def generator():
        return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))

    netG_A, netG_B = generator(), generator()
    optimizer = torch.optim.Adam([*netG_A.parameters(), *netG_B.parameters()], lr=2e-3, betas=(0.5, 0.999))

    def train(batches):
        for batch in batches:
            fake_b, fake_a = netG_A(batch["A"]), netG_B(batch["B"])
            cycle = F.l1_loss(netG_B(fake_b), batch["A"]) + F.l1_loss(netG_A(fake_a), batch["B"])
            identity = F.l1_loss(netG_A(batch["B"]), batch["B"]) + F.l1_loss(netG_B(batch["A"]), batch["A"])
            optimizer.zero_grad()
            (10 * cycle + 0.5 * identity).backward()
            optimizer.step()

    def save_networks(path):
        torch.save(
            {"G_A": netG_A.state_dict(), "G_B": netG_B.state_dict(), "optimizer_G": optimizer.state_dict()}, path
        )

    def load_networks(path):
        state = torch.load(path, map_location="cpu")
        netG_A.load_state_dict(state["G_A"])
        netG_B.load_state_dict(state["G_A"])
        optimizer.load_state_dict(state["optimizer_G"])

    data = [{"A": a, "B": 1 - b} for a, b in zip(images(), images(seed=11), strict=True)]
    return TrainLoop(
        model={"G_A": netG_A, "G_B": netG_B},
        optimizer=optimizer,
        batches=data,
        fit=train,
        save=save_networks,
        load=load_networks,
    )


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, k=3, alpha=0.5):
        self.base, self.k, self.alpha = base, k, alpha
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = base.state
        self.count = 0
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            for s, p in zip(self.slow, fast, strict=True):
                s.add_(p.detach() - s, alpha=self.alpha)
                p.data.copy_(s)
        return loss

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return {"base": self.base.state_dict(), "count": self.count}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.count = state["count"]


@fault(
    "checkpoints",
    "Lookahead's slow weights are not in its state_dict: the initial weights are mixed in after a resume",
    thread="mgrankin/over9000#8",
    check="resume_equivalence",
)
def lookahead_radam():
    model = mlp()
    base = torch.optim.RAdam(model.parameters(), lr=1e-2)
    optimizer = Lookahead(base)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
            optimizer.step()

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["opt"])

    return TrainLoop(
        model=model,
        optimizer=base,
        batches=classified(),
        fit=train,
        save=lambda: {"model": model.state_dict(), "opt": optimizer.state_dict()},
        load=load,
    )


@fault(
    "checkpoints",
    "a checkpoint between two micro-batches drops the gradient that is accumulated so far",
    thread="Nerogar/OneTrainer#1465",
    check="resume_equivalence",
)
def accumulating_trainer():
    class GenericTrainer:
        accumulation_steps = 4

        def __init__(self):
            self.model = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
            self.global_step = 0

        def train(self, batches):
            for x in batches:
                loss = F.mse_loss(self.model(0.5 * x), x)
                (loss / self.accumulation_steps).backward()
                self.global_step += 1
                if self.global_step % self.accumulation_steps == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)

        def backup(self, path):
            torch.save(
                {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "global_step": self.global_step,
                },
                path,
            )

        def restore(self, path):
            backup = torch.load(path)
            self.model.load_state_dict(backup["model"])
            self.optimizer.load_state_dict(backup["optimizer"])
            self.global_step = backup["global_step"]

    t = GenericTrainer()
    return TrainLoop(
        model=t.model,
        optimizer=t.optimizer,
        batches=images(batches=12),
        fit=t.train,
        save=t.backup,
        load=t.restore,
    )


@fault(
    "checkpoints",
    "the scheduler is built after the optimizer's state is loaded and sets lr back to the warm-up's first value",
    thread="torch-points3d/torch-points3d#630",
    check="resume_equivalence",
)
def point_clouds():
    class Checkpointed:
        def __init__(self, checkpoint=None):
            self.model = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 5))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-2)
            self.scheduler = self.make_scheduler()

        def make_scheduler(self):
            return LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 6))

        def train_epoch(self, batches):
            for points, labels in batches:
                self.optimizer.zero_grad()
                out = self.model(points).max(dim=1).values
                F.cross_entropy(out, labels).backward()
                self.optimizer.step()
                self.scheduler.step()

        def dump(self):
            return copy.deepcopy(
                {
                    "state": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(),
                }
            )

        def load(self, saved):
            self.model.load_state_dict(saved["state"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.scheduler = self.make_scheduler()
            self.scheduler.load_state_dict(saved["scheduler"])

    c = Checkpointed()
    g = torch.Generator().manual_seed(12)
    clouds = [(torch.randn(4, 9, 3, generator=g), torch.randint(5, (4,), generator=g)) for _ in range(8)]
    return TrainLoop(model=c.model, optimizer=c.optimizer, batches=clouds, fit=c.train_epoch, save=c.dump, load=c.load)


@fault(
    "checkpoints",
    "save copies the EMA into the model and does not put the raw weights back",
    thread="harubaru/waifu-diffusion#31",
    check="resume_equivalence",
)
def denoiser():
    class EMAModel:
        def __init__(self, parameters, decay=0.9):
            self.shadow_params = [p.clone().detach() for p in parameters]
            self.decay = decay

        @torch.no_grad()
        def step(self, parameters):
            for s, p in zip(self.shadow_params, parameters, strict=True):
                s.sub_((1 - self.decay) * (s - p))

        def copy_to(self, parameters):
            for s, p in zip(self.shadow_params, parameters, strict=True):
                p.data.copy_(s.data)

        def state_dict(self):
            return {"decay": self.decay, "shadow_params": [s.clone() for s in self.shadow_params]}

        def load_state_dict(self, state):
            self.decay, self.shadow_params = state["decay"], state["shadow_params"]

    unet = nn.Sequential(nn.Linear(17, 32), nn.SiLU(), nn.Linear(32, 16))
    ema_unet = EMAModel(unet.parameters())
    optimizer = torch.optim.AdamW(unet.parameters(), lr=4e-3)

    def train(batches):
        for x, noise, t in batches:
            noisy = x * (1 - t) + noise * t
            loss = F.mse_loss(unet(torch.cat([noisy, t], 1)), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema_unet.step(unet.parameters())

    def save_checkpoint(path):
        ema_unet.copy_to(unet.parameters())
        torch.save({"unet": unet.state_dict(), "ema": ema_unet.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load_checkpoint(path):
        ckpt = torch.load(path)
        unet.load_state_dict(ckpt["unet"])
        ema_unet.load_state_dict(ckpt["ema"])
        optimizer.load_state_dict(ckpt["optimizer"])

    g = torch.Generator().manual_seed(13)
    data = [(x, torch.randn(x.shape, generator=g), torch.rand(len(x), 1, generator=g)) for x in images()]
    return TrainLoop(
        model=unet, optimizer=optimizer, batches=data, fit=train, save=save_checkpoint, load=load_checkpoint
    )


@fault(
    "checkpoints",
    "the generator of the noise is seeded anew: the resumed run draws the first run's noise again",
    thread="ai2cm/ace#690",
    check="resume_equivalence",
)
def stepper():
    class Stepper:
        def __init__(self, seed=0):
            self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)
            self.rng = torch.Generator().manual_seed(seed)
            self.batches_seen = 0

        def run(self, batches):
            for x in batches:
                noisy = x + 0.3 * torch.randn(x.shape, generator=self.rng)
                self.opt.zero_grad()
                F.mse_loss(self.net(noisy), x).backward()
                self.opt.step()
                self.batches_seen += 1

        def get_state(self):
            return {
                "net": self.net.state_dict(),
                "opt": self.opt.state_dict(),
                "batches_seen": self.batches_seen,
            }

        def set_state(self, state):
            self.net.load_state_dict(state["net"])
            self.opt.load_state_dict(state["opt"])
            self.batches_seen = state["batches_seen"]

    s = Stepper()
    return TrainLoop(model=s.net, optimizer=s.opt, batches=images(), fit=s.run, save=s.get_state, load=s.set_state)


@fault(
    "checkpoints",
    "n_averaged is not restored: the average starts over with the next weights",
    thread="Lightning-AI/pytorch-lightning#9938",
    check="resume_equivalence",
)
def stochastic_weight_averaging():
    model = mlp()
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)

    def save(path):
        torch.save(
            {"model": model.state_dict(), "swa": average.module.state_dict(), "optim": optimizer.state_dict()}, path
        )

    def load(path):
        ckpt = torch.load(path)
        model.load_state_dict(ckpt["model"])
        average.module.load_state_dict(ckpt["swa"])
        optimizer.load_state_dict(ckpt["optim"])

    return TrainLoop(
        model={"model": model, "swa": average},
        optimizer=optimizer,
        batches=classified(),
        fit=train,
        save=save,
        load=load,
    )


@fault(
    "checkpoints",
    "the weights are saved in half precision: the resumed run starts from rounded ones",
    thread="ultralytics/ultralytics#2235",
    check="resume_equivalence",
)
def yolo_trainer():
    class DetectionTrainer:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 4))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.937, nesterov=True)
            self.epoch = 0

        def _do_train(self, batches):
            for x, y in batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
                self.optimizer.step()
            self.epoch += 1

        def save_model(self, path):
            ckpt = {
                "epoch": self.epoch,
                "model": copy.deepcopy(self.model).half(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(ckpt, path)

        def resume_training(self, path):
            ckpt = torch.load(path, weights_only=False)
            self.model.load_state_dict(ckpt["model"].float().state_dict())
            self.optimizer.load_state_dict(ckpt["optimizer"])
            self.epoch = ckpt["epoch"]

    t = DetectionTrainer()
    return TrainLoop(
        model=t.model,
        optimizer=t.optimizer,
        batches=classified(),
        fit=t._do_train,
        save=t.save_model,
        load=t.resume_training,
    )


@fault(
    "checkpoints",
    "the scheduler's load_state_dict steps before it restores wd: the first update has a stale weight_decay",
    thread="NVIDIA/Megatron-LM#7468",
    check="resume_equivalence",
)
def param_scheduler():
    class OptimizerParamScheduler:
        def __init__(self, optimizer, max_lr, start_wd, growth):
            self.optimizer, self.max_lr, self.growth = optimizer, max_lr, growth
            self.wd = start_wd
            self.num_steps = 0
            self.step(0)

        def step(self, increment=1):
            self.num_steps += increment
            for group in self.optimizer.param_groups:
                group["lr"] = self.max_lr * min(1.0, (self.num_steps + 1) / 4)
                group["weight_decay"] = self.wd
            self.wd = min(2.0, self.wd * self.growth)

        def state_dict(self):
            return {"max_lr": self.max_lr, "num_steps": self.num_steps, "wd": self.wd}

        def load_state_dict(self, state):
            self.max_lr = state["max_lr"]
            self.num_steps = 0
            self.step(increment=state["num_steps"])
            self.wd = state["wd"]

    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = OptimizerParamScheduler(optimizer, 1e-2, 0.05, 1.6)
    total = {"tokens": 0}

    def train(batches):
        for ids in batches:
            optimizer.zero_grad()
            model.loss(ids).backward()
            optimizer.step()
            scheduler.step()
            total["tokens"] += ids.numel()

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["opt_param_scheduler"])
        total["tokens"] = state["tokens"]

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=tokens(),
        fit=train,
        save=lambda: {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": scheduler.state_dict(),
            "tokens": total["tokens"],
        },
        load=load,
    )


@fault(
    "checkpoints",
    "start_epoch is the saved epoch and not the one after it: the learning rate of an epoch comes twice",
    thread="KaiyangZhou/deep-person-reid#64",
    check="resume_equivalence",
)
def person_reid_script():
    args = {"lr": 0.1, "start_epoch": 0, "gamma": 0.6}
    model = mlp(classes=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=args["lr"], momentum=0.9, weight_decay=5e-4)
    reached = {"epoch": -1}

    def adjust_learning_rate(epoch):
        for group in optimizer.param_groups:
            group["lr"] = args["lr"] * args["gamma"] ** epoch

    def train(batches):
        epoch = args["start_epoch"]
        adjust_learning_rate(epoch)
        for imgs, pids in batches:
            loss = F.cross_entropy(model(imgs), pids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached["epoch"] = epoch
        args["start_epoch"] = epoch + 1

    def load(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        args["start_epoch"] = checkpoint["epoch"]

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(classes=6, seed=14),
        fit=train,
        save=lambda path: torch.save(
            {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": reached["epoch"]}, path
        ),
        load=load,
    )


@fault(
    "checkpoints",
    "the discriminator's optimizer is not saved, the generator's is",
    thread="dansuh17/segan-pytorch#14",
    check="resume_equivalence",
)
def adversarial_enhancement():
    generator = nn.Sequential(nn.Linear(16, 24), nn.PReLU(), nn.Linear(24, 16))
    discriminator = nn.Sequential(nn.Linear(32, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    d_optimizer = torch.optim.RMSprop(discriminator.parameters(), lr=1e-3)

    def train(batches):
        for clean, noisy in batches:
            d_optimizer.zero_grad()
            real = discriminator(torch.cat([clean, noisy], 1))
            fake = discriminator(torch.cat([generator(noisy).detach(), noisy], 1))
            ((real - 1) ** 2 + fake**2).mean().backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            out = generator(noisy)
            adv = ((discriminator(torch.cat([out, noisy], 1)) - 1) ** 2).mean()
            (adv + 10 * F.l1_loss(out, clean)).backward()
            g_optimizer.step()

    def save(path):
        torch.save(
            {
                "generator": generator.state_dict(),
                "discriminator": discriminator.state_dict(),
                "g_optimizer": g_optimizer.state_dict(),
            },
            path,
        )

    def load(path):
        saved = torch.load(path)
        generator.load_state_dict(saved["generator"])
        discriminator.load_state_dict(saved["discriminator"])
        g_optimizer.load_state_dict(saved["g_optimizer"])

    g = torch.Generator().manual_seed(15)
    data = [(x, x + 0.2 * torch.randn(x.shape, generator=g)) for x in images()]
    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[g_optimizer, d_optimizer],
        batches=data,
        fit=train,
        save=save,
        load=load,
    )


@fault(
    "checkpoints",
    "ReduceLROnPlateau is made anew on load: best and num_bad_epochs are forgotten",
    thread="KaiyangZhou/deep-person-reid#270",
    check="resume_equivalence",
)
def plateau_schedule():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    parts = {"scheduler": ReduceLROnPlateau(optimizer, factor=0.3, patience=1, threshold=0.5)}

    def train(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            parts["scheduler"].step(loss.item())

    def load(ckpt):
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
        parts["scheduler"] = ReduceLROnPlateau(optimizer, factor=0.3, patience=1, threshold=0.5)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=classified(seed=16),
        fit=train,
        save=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        load=load,
    )


@fault(
    "checkpoints",
    "the loss has parameters of its own (the log-variances) which are not saved",
    thread="huggingface/sentence-transformers#2648",
    check="resume_equivalence",
)
def weighted_tasks():
    class UncertaintyLoss(nn.Module):
        def __init__(self, tasks):
            super().__init__()
            self.log_vars = nn.Parameter(torch.zeros(tasks))

        def forward(self, *losses):
            return sum(torch.exp(-v) * one + v for v, one in zip(self.log_vars, losses, strict=True))

    trunk = nn.Linear(12, 24)
    heads = nn.ModuleList([nn.Linear(24, 4), nn.Linear(24, 1)])
    net = nn.ModuleDict({"trunk": trunk, "heads": heads})
    criterion = UncertaintyLoss(2)
    optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.1)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=200)

    def fit(batches):
        for x, y in batches:
            h = torch.relu(trunk(x))
            loss = criterion(F.cross_entropy(heads[0](h), y), F.mse_loss(heads[1](h).squeeze(1), x.sum(1)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    def load(path):
        state = torch.load(path)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    return TrainLoop(
        model={"net": net, "criterion": criterion},
        optimizer=optimizer,
        scheduler=scheduler,
        batches=classified(seed=17),
        fit=fit,
        save=lambda path: torch.save(
            {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, path
        ),
        load=load,
    )
