"""DistributedDataParallel around models that change, or that are called past it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


class ActionHead(nn.Module):
    def __init__(self, hidden: int, horizon: int, action: int) -> None:
        super().__init__()
        self.horizon, self.action = horizon, action
        self.net = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, horizon * action)
        )

    def predict_action(self, states: torch.Tensor) -> torch.Tensor:
        return self.net(states).view(-1, self.horizon, self.action)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.predict_action(states)


@fault(
    "wrapping",
    "the action head is called through .module.predict_action, so that DDP does not reduce its gradients",
    thread="moojink/openvla-oft#160",
    check="distributed_equivalence",
    place="action_head.module.predict_action",
)
def vla_finetune(ranks=1):
    vla = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24))
    action_head = ActionHead(24, 4, 3)
    if ranks > 1:
        vla, action_head = DDP(vla), DDP(action_head)
    optimizer = torch.optim.AdamW([*vla.parameters(), *action_head.parameters()], lr=1e-3)

    def run_forward_pass(batch):
        hidden = vla(batch["observation"])
        if isinstance(action_head, DDP):
            predicted = action_head.module.predict_action(hidden)
        else:
            predicted = action_head.predict_action(hidden)
        return F.l1_loss(predicted, batch["actions"])

    def finetune(batches):
        for batch in batches:
            loss = run_forward_pass(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    batch = {"observation": torch.randn(8, 12), "actions": torch.randn(8, 4, 3)}
    return TrainLoop(model={"vla": vla, "head": action_head}, optimizer=optimizer, batch=batch, fit=finetune)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Denoiser(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(width + 1, 32)
        self.mid = nn.Linear(32, 32)
        self.out = nn.Linear(32, width)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.inp(torch.cat([x, t], 1)))
        return self.out(F.silu(self.mid(h)))


@fault(
    "wrapping",
    "only the list of LoRA layers is wrapped in DDP; the forward pass goes through the unwrapped unet",
    thread="huggingface/diffusers#4046",
    check="distributed_equivalence",
    place="lora_layers = DDP(lora_layers)",
)
def text_to_image_lora(ranks=1):
    unet = Denoiser().requires_grad_(False)
    unet.mid = LowRank(unet.mid)
    unet.out = LowRank(unet.out)
    lora_layers = nn.ModuleList([unet.mid.down, unet.mid.up, unet.out.down, unet.out.up])
    if ranks > 1:
        lora_layers = DDP(lora_layers)
    optimizer = torch.optim.AdamW(lora_layers.parameters(), lr=1e-2, weight_decay=1e-2)

    def train(batches):
        for latents, noise, t in batches:
            noisy = latents + t * noise
            model_pred = unet(noisy, t)
            loss = F.mse_loss(model_pred, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lora_layers.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    batch = (torch.randn(8, 16), torch.randn(8, 16), torch.rand(8, 1))
    return TrainLoop(model=unet, optimizer=optimizer, batch=batch, fit=train)


@fault(
    "wrapping",
    "LoRA layers are put in after DDP was built, which does not know them",
    thread="hao-ai-lab/FastVideo#1666",
    check="distributed_equivalence",
    place="inject(",
)
def inject_adapters(ranks=1):
    model = Denoiser(12)
    if ranks > 1:
        model = DDP(model)

    def inject(net, names):
        for name in names:
            setattr(net, name, LowRank(getattr(net, name), rank=3))

    inject(model.module if ranks > 1 else model, ["mid", "inp"])
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05)

    def train_one_step(batch):
        optimizer.zero_grad(set_to_none=True)
        pred = model(batch["x"], batch["t"])
        loss = (pred - batch["target"]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    batch = {"x": torch.randn(12, 12), "t": torch.rand(12, 1), "target": torch.randn(12, 12)}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: [train_one_step(b) for b in bs])


class Tagger(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 20), nn.ReLU())
        self.head = nn.Linear(20, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


class FineTuneTask:
    """Trains the head, then everything."""

    def __init__(self, model: nn.Module, unfreeze_at: int) -> None:
        self.model = model
        self.unfreeze_at = unfreeze_at
        self.net = model.module if isinstance(model, DDP) else model
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.updates = 0

    def on_update(self) -> None:
        self.updates += 1
        if self.updates == self.unfreeze_at:
            self.net.trunk.requires_grad_(True)

    def run(self, batches) -> None:
        self.model.train()
        for images, target in batches:
            loss = F.cross_entropy(self.model(images), target)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.on_update()


@fault(
    "wrapping",
    "the trunk is frozen when DDP is built and unfrozen later: DDP never reduces its gradients",
    thread="facebookresearch/fairscale#368",
    check="distributed_equivalence",
    place="self.net.trunk.requires_grad_(True)",
)
def gradual_unfreezing(ranks=1):
    model = Tagger()
    model.trunk.requires_grad_(False)
    if ranks > 1:
        model = DDP(model)
    task = FineTuneTask(model, unfreeze_at=1)
    batch = (torch.randn(16, 10), torch.randint(5, (16,)))
    return TrainLoop(model=model, optimizer=task.optimizer, batch=batch, fit=task.run)


@fault(
    "wrapping",
    "parameters are frozen after DDP was built; its reducer waits for their gradients and raises in the next step",
    thread="facebookresearch/ClassyVision#398",
    check="distributed_equivalence",
    place="requires_grad_(False)",
)
def freeze_trunk_for_transfer(ranks=1):
    model = Tagger(classes=3)
    net = model
    if ranks > 1:
        model = DDP(model)
    net.trunk.requires_grad_(False)
    optimizer = torch.optim.Adam(net.head.parameters(), lr=1e-2)

    def train_epoch(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    batch = (torch.randn(8, 10), torch.randint(3, (8,)))
    return TrainLoop(model=net, optimizer=optimizer, batch=batch, fit=train_epoch, frozen=("trunk.",))


@fault(
    "wrapping",
    "the classifier is replaced after wrapping",
    thread="pytorch/pytorch#12603",
    check="distributed_equivalence",
    place="net.head = nn.Linear",
)
def swap_classifier(ranks=1, num_classes=7):
    model = Tagger(classes=100)
    if ranks > 1:
        model = DDP(model)
    net = getattr(model, "module", model)
    net.head = nn.Linear(net.head.in_features, num_classes)
    optimizer = torch.optim.SGD(
        [{"params": net.trunk.parameters(), "lr": 1e-3}, {"params": net.head.parameters(), "lr": 1e-1}], momentum=0.9
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def fit(loader):
        for batch in loader:
            logits = model(batch["pixel_values"])
            loss = criterion(logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batch = {"pixel_values": torch.randn(8, 10), "labels": torch.randint(num_classes, (8,))}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)


class ArcMargin(nn.Module):
    def __init__(self, dim: int, classes: int, scale: float = 16.0, margin: float = 0.2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim) * 0.1)
        self.scale, self.margin = scale, margin

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        cosine = F.normalize(features) @ F.normalize(self.weight).t()
        target = F.one_hot(labels, cosine.shape[1]).to(cosine.dtype)
        return F.cross_entropy(self.scale * (cosine - self.margin * target), labels)


@fault(
    "wrapping",
    "the loss holds class centres that are trained; only the backbone is wrapped",
    thread="KevinMusgrave/pytorch-metric-learning#710",
    check="distributed_equivalence",
    place="backbone = DDP(backbone)",
)
def face_recognition(ranks=1):
    backbone = nn.Sequential(nn.Linear(14, 32), nn.PReLU(), nn.Linear(32, 16))
    margin = ArcMargin(16, 6)
    if ranks > 1:
        backbone = DDP(backbone)
    optimizer = torch.optim.SGD([*backbone.parameters(), *margin.parameters()], lr=0.1, weight_decay=5e-4)

    def train(batches):
        for faces, identities in batches:
            loss = margin(backbone(faces), identities)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batch = (torch.randn(12, 14), torch.randint(6, (12,)))
    return TrainLoop(model={"backbone": backbone, "margin": margin}, optimizer=optimizer, batch=batch, fit=train)


@dataclass
class GanConfig:
    z: int = 6
    width: int = 24
    lr: float = 2e-4


@fault(
    "wrapping",
    "the generator is wrapped, the discriminator is not",
    thread="rosinality/swapping-autoencoder-pytorch#22",
    check="distributed_equivalence",
    place="generator = DDP(generator)",
)
def adversarial(ranks=1):
    cfg = GanConfig()
    generator = nn.Sequential(nn.Linear(cfg.z, cfg.width), nn.ReLU(), nn.Linear(cfg.width, 8))
    discriminator = nn.Sequential(nn.Linear(8, cfg.width), nn.LeakyReLU(0.2), nn.Linear(cfg.width, 1))
    if ranks > 1:
        generator = DDP(generator)
    g_optim = torch.optim.Adam(generator.parameters(), lr=cfg.lr, betas=(0.0, 0.99))
    d_optim = torch.optim.Adam(discriminator.parameters(), lr=cfg.lr, betas=(0.0, 0.99))

    def train(batches):
        for real, z in batches:
            discriminator.requires_grad_(True)
            with torch.no_grad():
                fake = generator(z)
            d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake)).mean()
            d_optim.zero_grad()
            d_loss.backward()
            d_optim.step()
            discriminator.requires_grad_(False)
            g_loss = F.softplus(-discriminator(generator(z))).mean()
            g_optim.zero_grad()
            g_loss.backward()
            g_optim.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[g_optim, d_optim],
        batch=(torch.randn(8, 8), torch.randn(8, cfg.z)),
        fit=train,
    )


@fault(
    "wrapping",
    "weights are assigned into the wrapped model as new parameters, on which DDP has no hooks",
    thread="pytorch/pytorch#104336",
    check="distributed_equivalence",
    place="assign=True",
)
def warm_start(ranks=1):
    model = Tagger(classes=4)
    pretrained = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
    if ranks > 1:
        model = DDP(model)
    inner = model.module if ranks > 1 else model
    inner.load_state_dict(pretrained, assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def training_step(batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = (torch.randn(16, 10), torch.randint(4, (16,)))
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=lambda bs: [training_step(b) for b in bs])


@fault(
    "wrapping",
    "gradients come from torch.autograd.grad, which DDP does not see",
    thread="pytorch/pytorch#47562",
    check="distributed_equivalence",
    place="torch.autograd.grad(loss",
)
def per_loss_gradients(ranks=1):
    net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 2))
    model = DDP(net) if ranks > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def fit(batches):
        parameters = list(net.parameters())
        for x, y in batches:
            loss = F.smooth_l1_loss(model(x), y)
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = g
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=net, optimizer=optimizer, batch=(torch.randn(8, 6), torch.randn(8, 2)), fit=fit)


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(9, 16)
        self.tasks = nn.ModuleDict({"depth": nn.Linear(16, 1), "normals": nn.Linear(16, 3)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.tasks[task](torch.relu(self.encoder(x)))


@fault(
    "wrapping",
    "each step trains one head; without find_unused_parameters DDP raises in the second step",
    thread="pytorch/pytorch#22049",
    check="distributed_equivalence",
    place="model = DDP(model)",
)
def alternating_tasks(ranks=1):
    model = MultiTask()
    if ranks > 1:
        model = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for i, batch in enumerate(batches):
            task = ("depth", "normals")[i % 2]
            loss = F.mse_loss(model(batch["image"], task), batch[task])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batch = {"image": torch.randn(8, 9), "depth": torch.randn(8, 1), "normals": torch.randn(8, 3)}
    return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=train)
