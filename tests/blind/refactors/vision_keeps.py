"""Images: classification, detection, segmentation, diffusion."""

# ruff: noqa: N801, N805
from __future__ import annotations

import copy
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import keeps

CLASSES = 4


def images(n, rows=6, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, 3, size, size, generator=generator),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(n)
    ]


def scenes(n, rows=4, size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "image": torch.randn(rows, 3, size, size, generator=generator),
            "mask": torch.randint(0, 3, (rows, size, size), generator=generator),
        }
        for _ in range(n)
    ]


def classify(model, optimizer, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def loop(model, fit=classify, batches=images, lr=0.02):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=batches, fit=lambda batches: fit(model, optimizer, batches)
    )


@keeps(
    "vision",
    "the convolutions of a bottleneck are spelt out",
    thread="roboflow/rf-detr#1091",
    renamed={
        "neck.cv1": "neck.conv1",
        "neck.cv2": "neck.conv2",
        "neck.m": "neck.bottlenecks",
        "fc": "classifier",
    },
)
class bottleneck_names:
    def before():
        class C2f(nn.Module):
            def __init__(self, c1, c2):
                super().__init__()
                self.c = c2 // 2
                self.cv1 = nn.Conv2d(c1, 2 * self.c, 1)
                self.cv2 = nn.Conv2d(3 * self.c, c2, 1)
                self.m = nn.ModuleList([nn.Conv2d(self.c, self.c, 3, padding=1)])

            def forward(self, x):
                y = list(self.cv1(x).chunk(2, 1))
                y.extend(F.silu(m(y[-1])) for m in self.m)
                return self.cv2(torch.cat(y, 1))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
                self.neck = C2f(8, 12)
                self.fc = nn.Linear(12, CLASSES)

            def forward(self, x):
                return self.fc(self.neck(F.silu(self.stem(x))).mean((2, 3)))

        return loop(Model())

    def after():
        class CSPLayer(nn.Module):
            def __init__(self, in_channels, out_channels, depth=1):
                super().__init__()
                hidden = out_channels // 2
                self.conv1 = nn.Conv2d(in_channels, 2 * hidden, kernel_size=1)
                self.conv2 = nn.Conv2d((2 + depth) * hidden, out_channels, kernel_size=1)
                self.bottlenecks = nn.ModuleList(
                    nn.Conv2d(hidden, hidden, kernel_size=3, padding=1) for _ in range(depth)
                )

            def forward(self, x):
                left, right = self.conv1(x).chunk(2, dim=1)
                outputs = [left, right]
                for bottleneck in self.bottlenecks:
                    right = F.silu(bottleneck(right))
                    outputs.append(right)
                return self.conv2(torch.cat(outputs, dim=1))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem = nn.Conv2d(3, 8, kernel_size=3, stride=2, padding=1)
                self.neck = CSPLayer(8, 12)
                self.classifier = nn.Linear(12, CLASSES)

            def forward(self, images):
                features = self.neck(F.silu(self.stem(images)))
                return self.classifier(F.adaptive_avg_pool2d(features, 1).flatten(1))

        return loop(Model())


@keeps(
    "vision",
    "the layers of a sequence get names",
    thread="pytorch/vision#474",
    renamed={
        "features.0": "features.conv0",
        "features.1": "features.norm0",
        "features.4": "features.conv1",
        "features.5": "features.norm1",
    },
)
class sequence_names:
    def before():
        features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        return loop(
            nn.Sequential(
                OrderedDict(
                    features=features,
                    pool=nn.AdaptiveAvgPool2d(1),
                    flatten=nn.Flatten(),
                    head=nn.Linear(16, CLASSES),
                )
            )
        )

    def after():
        class Network(nn.Module):
            def __init__(self, widths=(8, 16)):
                super().__init__()
                self.features = nn.Sequential()
                channels = 3
                for i, width in enumerate(widths):
                    self.features.add_module(f"conv{i}", nn.Conv2d(channels, width, 3, padding=1, bias=False))
                    self.features.add_module(f"norm{i}", nn.BatchNorm2d(width))
                    self.features.add_module(f"relu{i}", nn.ReLU(inplace=True))
                    if i + 1 < len(widths):
                        self.features.add_module(f"pool{i}", nn.MaxPool2d(2))
                    channels = width
                self.head = nn.Linear(channels, CLASSES)

            def forward(self, x):
                x = self.features(x)
                return self.head(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))

        return loop(Network())


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


@keeps(
    "vision",
    "model and images are laid out with the channels last",
    thread="pytorch.org/tutorials/intermediate/memory_format_tutorial.html",
)
class memory_layout:
    def before():
        return loop(SmallNet())

    def after():
        def train(model, optimizer, batches):
            model.train()
            for x, y in batches:
                x = x.to(memory_format=torch.channels_last)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

        return loop(SmallNet().to(memory_format=torch.channels_last), train)


@keeps(
    "vision",
    "a convolution and its norm are moved into a module of their own",
    thread="NVIDIA/physicsnemo#1173",
    renamed={
        "conv1": "layers.0.conv",
        "bn1": "layers.0.norm",
        "conv2": "layers.1.conv",
        "bn2": "layers.1.norm",
        "fc": "head.fc",
    },
)
class conv_module:
    def before():
        return loop(SmallNet())

    def after():
        class ConvModule(nn.Module):
            def __init__(self, in_channels, out_channels, kernel_size=3, stride=1, act=F.relu):
                super().__init__()
                self.conv = nn.Conv2d(
                    in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False
                )
                self.norm = nn.BatchNorm2d(out_channels)
                self.act = act

            def forward(self, x):
                return self.act(self.norm(self.conv(x)))

        class Head(nn.Module):
            def __init__(self, channels, classes):
                super().__init__()
                self.fc = nn.Linear(channels, classes)

            def forward(self, x):
                return self.fc(x.flatten(2).mean(-1))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList([ConvModule(3, 8, stride=2), ConvModule(8, 16)])
                self.head = Head(16, CLASSES)

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                return self.head(x)

        return loop(Model())


class SegNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.decoder = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        return self.decoder(F.leaky_relu(self.norm(self.encoder(x)), 0.01))


@keeps(
    "vision",
    "soft Dice with sums over a one-hot mask becomes products over the axes, with the cross entropy from log-softmax",
    thread="MIC-DKFZ/nnUNet#1836",
)
class dice:
    def _fit(loss_fn):
        def train(model, optimizer, batches):
            for batch in batches:
                optimizer.zero_grad()
                loss_fn(model(batch["image"]), batch["mask"]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 12)
                optimizer.step()

        return train

    def before():
        def loss_fn(logits, mask, smooth=1e-5):
            p = logits.softmax(1)
            y = F.one_hot(mask, 3).movedim(-1, 1).to(p)
            tp = (p * y).sum((2, 3))
            fp = (p * (1 - y)).sum((2, 3))
            fn = ((1 - p) * y).sum((2, 3))
            dice = (2 * tp + smooth) / (2 * tp + fp + fn + smooth)
            return F.cross_entropy(logits, mask) - dice[:, 1:].mean()

        return loop(SegNet(), dice._fit(loss_fn), scenes)

    def after():
        class CompoundLoss(nn.Module):
            def __init__(self, smooth=1e-5, weight_ce=1.0, weight_dice=1.0):
                super().__init__()
                self.smooth, self.weight_ce, self.weight_dice = smooth, weight_ce, weight_dice
                self.nll = nn.NLLLoss()

            def forward(self, logits, mask):
                logp = F.log_softmax(logits, dim=1)
                p = logp.exp().flatten(2)
                y = torch.zeros_like(p).scatter_(1, mask.flatten(1).unsqueeze(1), 1)
                intersect = torch.einsum("bcn,bcn->bc", p, y)
                dc = (2 * intersect + self.smooth) / (p.sum(-1) + y.sum(-1) + self.smooth)
                return self.weight_ce * self.nll(logp, mask) - self.weight_dice * dc[:, 1:].mean()

        return loop(SegNet(), dice._fit(CompoundLoss()), scenes)


@keeps(
    "vision",
    "the convolutions of a pyramid are held in a dict by level in place of a list",
    thread="open-mmlab/mmengine#357",
    renamed={
        **{f"lateral.{i}": f"lateral.p{i + 2}" for i in range(2)},
        **{f"output.{i}": f"output.p{i + 2}" for i in range(2)},
    },
)
class pyramid:
    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.c2 = nn.Conv2d(3, 6, 3, stride=2, padding=1)
            self.c3 = nn.Conv2d(6, 10, 3, stride=2, padding=1)

        def forward(self, x):
            c2 = F.relu(self.c2(x))
            return c2, F.relu(self.c3(c2))

    def before():
        class FPN(nn.Module):
            def __init__(self):
                super().__init__()
                self.bottom_up = pyramid.Backbone()
                self.lateral = nn.ModuleList([nn.Conv2d(6, 8, 1), nn.Conv2d(10, 8, 1)])
                self.output = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)])
                self.head = nn.Linear(16, CLASSES)

            def forward(self, x):
                maps = [conv(c) for conv, c in zip(self.lateral, self.bottom_up(x), strict=True)]
                maps[0] = maps[0] + F.interpolate(maps[1], scale_factor=2, mode="nearest")
                maps = [conv(p) for conv, p in zip(self.output, maps, strict=True)]
                return self.head(torch.cat([p.amax((2, 3)) for p in maps], 1))

        return loop(FPN())

    def after():
        class FPN(nn.Module):
            levels = ("p2", "p3")

            def __init__(self):
                super().__init__()
                self.bottom_up = pyramid.Backbone()
                self.lateral = nn.ModuleDict({"p2": nn.Conv2d(6, 8, 1), "p3": nn.Conv2d(10, 8, 1)})
                self.output = nn.ModuleDict({name: nn.Conv2d(8, 8, 3, padding=1) for name in self.levels})
                self.head = nn.Linear(16, CLASSES)

            def forward(self, x):
                features = dict(zip(self.levels, self.bottom_up(x), strict=True))
                maps = {name: self.lateral[name](feature) for name, feature in features.items()}
                top = maps["p3"]
                maps["p2"] = maps["p2"] + top.repeat_interleave(2, -1).repeat_interleave(2, -2)
                pooled = [self.output[name](maps[name]).flatten(2).max(-1).values for name in self.levels]
                return self.head(torch.cat(pooled, dim=1))

        return loop(FPN())


@keeps(
    "vision",
    "an average of the weights, an evaluation with it and a log are added",
    thread="huggingface/diffusers#2899",
)
class evaluation_added:
    def before():
        return loop(SmallNet())

    def after():
        @torch.no_grad()
        def validate(model, batch):
            model.eval()
            accuracy = (model(batch[0]).argmax(1) == batch[1]).float().mean().item()
            model.train()
            return accuracy

        @torch.no_grad()
        def update(average, model, decay=0.9):
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 1 - decay)
            for a, b in zip(average.buffers(), model.buffers(), strict=True):
                a.copy_(b)

        def train(model, optimizer, batches):
            average = copy.deepcopy(model).requires_grad_(False)
            history = []
            model.train()
            for step, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                update(average, model)
                history.append({"loss": loss.item(), "norm": sum(p.norm().item() for p in model.parameters())})
                if step % 2 == 1:
                    history[-1]["accuracy"] = validate(model, (x, y))
                    history[-1]["average"] = validate(average, (x, y))
            return history

        return loop(SmallNet(), train)


@keeps("vision", "the model is compiled, with a backend that runs it as it is", thread="VectorInstitute/mmlearn#26")
class compiled:
    def before():
        return loop(SegNet(), dice._fit(F.cross_entropy), scenes)

    def after():
        model = SegNet()
        model.compile(backend="eager")
        return loop(model, dice._fit(nn.CrossEntropyLoss()), scenes)


@keeps(
    "vision",
    "the frozen norm folds its statistics by hand, then uses torch's function",
    thread="facebookresearch/maskrcnn-benchmark#267",
)
class frozen_norm:
    class Frozen(nn.Module):
        def __init__(self, channels, eps=1e-5):
            super().__init__()
            self.eps = eps
            self.register_buffer("weight", torch.linspace(0.5, 1.5, channels))
            self.register_buffer("bias", torch.linspace(-0.1, 0.1, channels))
            self.register_buffer("running_mean", torch.linspace(-0.2, 0.2, channels))
            self.register_buffer("running_var", torch.linspace(0.5, 2.0, channels))

    def _loop(norm):
        class Detector(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
                self.norm = norm(8)
                self.boxes = nn.Linear(8, 4)

            def forward(self, x):
                return self.boxes(F.relu(self.norm(self.conv(x))).mean((2, 3)))

        def train(model, optimizer, batches):
            for batch in batches:
                target = torch.stack([(batch["mask"] == i).to(batch["image"]).mean((1, 2)) for i in range(4)], 1)
                optimizer.zero_grad()
                F.smooth_l1_loss(model(batch["image"]), target).backward()
                optimizer.step()

        return loop(Detector(), train, scenes)

    def before():
        class FrozenBatchNorm2d(frozen_norm.Frozen):
            def forward(self, x):
                scale = self.weight * (self.running_var + self.eps).rsqrt()
                shift = self.bias - self.running_mean * scale
                return x * scale[:, None, None] + shift[:, None, None]

        return frozen_norm._loop(FrozenBatchNorm2d)

    def after():
        class FrozenBatchNorm2d(frozen_norm.Frozen):
            def forward(self, x):
                return F.batch_norm(
                    x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
                )

        return frozen_norm._loop(FrozenBatchNorm2d)


@keeps(
    "vision",
    "the weights of the timesteps are clamped in place of stacked and reduced, and the loss is a sum over a count",
    thread="huggingface/diffusers#9451",
)
class snr_weights:
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Embedding(10, 8)
            self.inp = nn.Conv2d(3, 8, 3, padding=1)
            self.out = nn.Conv2d(8, 3, 3, padding=1)

        def forward(self, x, t):
            return self.out(F.silu(self.inp(x) + self.time(t)[:, :, None, None]))

    def _loop(weigh):
        model = snr_weights.Denoiser()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

        def fit(batches):
            for batch in batches:
                x = batch["image"]
                alphas = torch.linspace(0.99, 0.02, 10).to(x).cumprod(0)
                noise = torch.randn_like(x)
                t = torch.randint(0, 10, (x.size(0),))
                a = alphas[t][:, None, None, None]
                prediction = model(a.sqrt() * x + (1 - a).sqrt() * noise, t)
                loss = weigh(prediction, noise, alphas[t] / (1 - alphas[t]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=scenes, fit=fit)

    def before():
        def weigh(prediction, noise, snr, gamma=5.0):
            weights = torch.stack([snr, gamma * torch.ones_like(snr)], dim=1).min(dim=1)[0] / snr
            loss = F.mse_loss(prediction, noise, reduction="none")
            loss = loss.mean(dim=list(range(1, loss.dim()))) * weights
            return loss.mean()

        return snr_weights._loop(weigh)

    def after():
        def weigh(prediction, noise, snr, gamma=5.0):
            weights = (gamma / snr).clamp(max=1.0)
            squared = (prediction - noise).pow(2).flatten(1)
            return (weights[:, None] * squared).sum() / squared.numel()

        return snr_weights._loop(weigh)
