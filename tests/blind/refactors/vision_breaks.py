"""Images: classification, detection, segmentation, diffusion."""

# ruff: noqa: N801, N805
from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import breaks

CLASSES = 5


def pixels(n, rows=6, size=8, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.rand(rows, 3, size, size, generator=generator),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(n)
    ]


def masks(n, rows=4, size=8, seed=6):
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


def loop(model, fit=classify, batches=pixels, lr=0.02):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=batches, fit=lambda batches: fit(model, optimizer, batches)
    )


class ConvNet(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn1 = norm(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.bn2 = norm(16)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


@breaks(
    "vision",
    "the momentum of the norms is given as in TensorFlow, 0.9",
    first="buffers",
    place="bn1.running_mean",
    thread="Cadene/pretrained-models.pytorch#44",
)
class norm_momentum:
    def before():
        return loop(ConvNet())

    def after():
        def batch_norm(channels, momentum=0.9):
            return nn.BatchNorm2d(channels, momentum=momentum)

        return loop(ConvNet(batch_norm))


@breaks(
    "vision",
    "images are normalised with the constants of another family of models",
    first="data",
    place="0",
    thread="huggingface/pytorch-image-models#2250",
)
class pixel_constants:
    def _batches(mean, std):
        def batches(n):
            m, s = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
            return [((x - m) / s, y) for x, y in pixels(n)]

        return batches

    def before():
        return loop(ConvNet(), batches=pixel_constants._batches((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

    def after():
        config = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "interpolation": "bicubic"}
        return loop(ConvNet(), batches=pixel_constants._batches(config["mean"], config["std"]))


@breaks(
    "vision",
    "the method that keeps the norms of the backbone in evaluation mode now takes those of the head too",
    first="output",
    place="head.bn",
    thread="dbolya/yolact#210",
)
class norm_mode:
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)
            self.bn = nn.BatchNorm2d(8)
            self.fc = nn.Linear(8, CLASSES)

        def forward(self, x):
            return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            self.head = norm_mode.Head()

        def forward(self, x):
            return self.head(self.backbone(x))

    def before():
        class Detector(norm_mode.Detector):
            def train(self, mode=True):
                super().train(mode)
                for module in self.backbone.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.eval()
                return self

        return loop(Detector())

    def after():
        class Detector(norm_mode.Detector):
            def train(self, mode=True):
                super().train(mode)
                if mode:
                    self.freeze_bn()
                return self

            def freeze_bn(self):
                for module in self.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.eval()

        return loop(Detector())


@breaks(
    "vision",
    "the default of the new configuration freezes the first stages",
    first="gradient",
    place="stem.weight",
    thread="facebookresearch/detectron2#1823",
)
class first_stages:
    class Backbone(nn.Module):
        def __init__(self, freeze_at=0):
            super().__init__()
            self.stem = nn.Conv2d(3, 6, 3, padding=1)
            self.res2 = nn.Conv2d(6, 8, 3, stride=2, padding=1)
            self.res3 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
            self.predictor = nn.Linear(12, CLASSES)
            for stage in (self.stem, self.res2, self.res3)[:freeze_at]:
                stage.requires_grad_(False)

        def forward(self, x):
            x = F.relu(self.res3(F.relu(self.res2(F.relu(self.stem(x))))))
            return self.predictor(x.mean((2, 3)))

    def before():
        return loop(first_stages.Backbone())

    def after():
        defaults = {"freeze_at": 1}
        return loop(first_stages.Backbone(**defaults))


@breaks(
    "vision",
    "the loss is no longer multiplied by the number of images",
    first="loss",
    place="",
    thread="ultralytics/ultralytics#3282",
)
class loss_scale:
    class Detect(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.box = nn.Conv2d(8, 4, 1)
            self.cls = nn.Conv2d(8, CLASSES, 1)

        def forward(self, x):
            x = F.silu(self.conv(x))
            return self.box(x), self.cls(x)

    def _loop(combine):
        def train(model, optimizer, batches):
            for x, y in batches:
                box, cls = model(x)
                targets = F.one_hot(y, CLASSES).to(cls)[:, :, None, None].expand_as(cls)
                items = torch.stack(
                    [7.5 * box.sigmoid().sub(0.3).abs().mean(), 0.5 * F.binary_cross_entropy_with_logits(cls, targets)]
                )
                optimizer.zero_grad()
                combine(items, len(x)).backward()
                optimizer.step()

        return loop(loss_scale.Detect(), train, lr=0.01)

    def before():
        return loss_scale._loop(lambda items, rows: items.sum() * rows)

    def after():
        class Criterion:
            names = ("box", "cls")

            def __call__(self, items, rows):
                parts = dict(zip(self.names, items, strict=True))
                return sum(parts.values())

        return loss_scale._loop(Criterion())


@breaks(
    "vision",
    "the target of the self-supervised loss comes from the online network, the average is no longer asked",
    first="calls",
    place="target",
    thread="lightly-ai/lightly#501",
)
class momentum_target:
    def _loop(step):
        online = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 8))
        predictor = nn.Linear(8, 8)
        target = copy.deepcopy(online).requires_grad_(False)
        optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], lr=0.05)

        def fit(batches):
            for x, _ in batches:
                views = x, x.flip(-1)
                loss = step(online, predictor, target, views)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for a, p in zip(target.parameters(), online.parameters(), strict=True):
                        a.mul_(0.9).add_(p, alpha=0.1)

        return TrainLoop(
            model={"online": online, "predictor": predictor, "target": target},
            optimizer=optimizer,
            batches=pixels,
            fit=fit,
            frozen=("target.",),
        )

    def before():
        def step(online, predictor, target, views):
            a, b = views
            with torch.no_grad():
                ta, tb = target(a), target(b)
            pa, pb = predictor(online(a)), predictor(online(b))
            return -F.cosine_similarity(pa, tb).mean() - F.cosine_similarity(pb, ta).mean()

        return momentum_target._loop(step)

    def after():
        def step(online, predictor, target, views):
            features = [online(view) for view in views]
            predictions = [predictor(feature) for feature in features]
            targets = [feature.detach() for feature in features]
            pairs = zip(predictions, reversed(targets), strict=True)
            return -sum(F.cosine_similarity(p, t).mean() for p, t in pairs)

        return momentum_target._loop(step)


@breaks(
    "vision",
    "the weights of the scales no longer add up to one",
    first="loss",
    place="",
    thread="MIC-DKFZ/nnUNet#1277",
)
class scale_weights:
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
            self.coarse = nn.Conv2d(8, 3, 1)
            self.fine = nn.Conv2d(6, 3, 1)

        def forward(self, x):
            low = F.leaky_relu(self.down(x), 0.01)
            return self.fine(F.leaky_relu(self.up(low), 0.01)), self.coarse(low)

    def _loop(weights):
        def train(model, optimizer, batches):
            for batch in batches:
                outputs = model(batch["image"])
                targets = batch["mask"], batch["mask"][:, ::2, ::2]
                optimizer.zero_grad()
                losses = [F.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)]
                sum(w * v for w, v in zip(weights, losses, strict=True)).backward()
                optimizer.step()

        return loop(scale_weights.UNet(), train, masks)

    def before():
        weights = [1 / 2**i for i in range(2)]
        return scale_weights._loop([w / sum(weights) for w in weights])

    def after():
        return scale_weights._loop([0.5**i for i in range(2)])


@breaks(
    "vision",
    "upsampling no longer aligns the corners",
    first="output",
    place="refine",
    thread="kazuto1011/deeplab-pytorch#37",
)
class upsampling:
    class Segmenter(nn.Module):
        def __init__(self, upsample):
            super().__init__()
            self.low = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.refine = nn.Conv2d(8, 3, 3, padding=1)
            self.upsample = upsample

        def forward(self, x):
            return self.refine(self.upsample(F.relu(self.low(x)), x.shape[-2:]))

    def _fit(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["image"]), batch["mask"]).backward()
            optimizer.step()

    def before():
        def upsample(x, size):
            return F.interpolate(x, size=size, mode="bilinear", align_corners=True)

        return loop(upsampling.Segmenter(upsample), upsampling._fit, masks)

    def after():
        def resize(x, size, mode="bilinear"):
            return F.interpolate(x, size=size, mode=mode)

        return loop(upsampling.Segmenter(resize), upsampling._fit, masks)


class ViT(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, stride=4)
        self.blocks = nn.Sequential(block(), block())
        self.norm = nn.LayerNorm(16, eps=1e-6)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class DropPath(nn.Module):
    def __init__(self, p, scale_by_keep=True):
        super().__init__()
        self.p, self.scale_by_keep = p, scale_by_keep

    def forward(self, x):
        if self.p == 0.0 or not self.training:
            return x
        keep = 1 - self.p
        mask = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(keep)
        if self.scale_by_keep:
            mask.div_(keep)
        return x * mask


@breaks(
    "vision",
    "rows that keep their branch are no longer scaled by the share that is kept",
    first="output",
    place="blocks.0.drop_path",
    thread="microsoft/Swin-Transformer#366",
)
class stochastic_depth:
    class Block(nn.Module):
        def __init__(self, drop_path):
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.drop_path = drop_path

        def forward(self, x):
            return x + self.drop_path(self.mlp(self.norm(x)))

    def before():
        return loop(ViT(lambda: stochastic_depth.Block(DropPath(0.3))))

    def after():
        def block(drop_path=0.3, **kwargs):
            return stochastic_depth.Block(DropPath(drop_path, kwargs.get("scale_by_keep", False)))

        return loop(ViT(block))


@breaks(
    "vision",
    "the norms of the blocks have torch's default epsilon in place of 1e-6",
    first="output",
    place="blocks.0.norm1",
    thread="karpathy/makemore#1",
)
class norm_epsilon:
    class Block(nn.Module):
        def __init__(self, norm_layer):
            super().__init__()
            self.norm1 = norm_layer(16)
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
            self.norm2 = norm_layer(16)
            self.mlp = nn.Linear(16, 16)

        def forward(self, x):
            y = self.norm1(x)
            x = x + self.attn(y, y, y, need_weights=False)[0]
            return x + F.gelu(self.mlp(self.norm2(x)))

    def before():
        def norm_layer(width):
            return nn.LayerNorm(width, eps=1e-6)

        return loop(ViT(lambda: norm_epsilon.Block(norm_layer)))

    def after():
        return loop(ViT(lambda: norm_epsilon.Block(nn.LayerNorm)))


@breaks(
    "vision",
    "the init of the convolutions is no longer called",
    first="weights",
    place="conv1.weight",
    thread="GeekLiB/caffe-model#4",
)
class conv_init:
    def before():
        model = ConvNet()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return loop(model)

    def after():
        class ResNet(ConvNet):
            def __init__(self):
                super().__init__()
                self.reset(nn.Linear)

            def reset(self, kind):
                for module in self.children():
                    if isinstance(module, kind) and hasattr(module, "kernel_size"):
                        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

        return loop(ResNet())


@breaks(
    "vision",
    "the learned scale of the similarities is used without its exponential",
    first="output",
    place="",
    thread="BAAI-DCAI/M3D#52",
)
class similarity_scale:
    class CLIP(nn.Module):
        def __init__(self):
            super().__init__()
            self.visual = nn.Sequential(nn.Flatten(), nn.Linear(192, 8))
            self.text = nn.Embedding(CLASSES, 8)
            self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

        def encode(self, x, y):
            return F.normalize(self.visual(x), dim=-1), F.normalize(self.text(y), dim=-1)

    def _fit(model, optimizer, batches):
        for x, y in batches:
            image, text, scale = model(x, y)
            logits = scale * image @ text.t()
            target = torch.arange(len(x))
            optimizer.zero_grad()
            ((F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2).backward()
            optimizer.step()

    def before():
        class CLIP(similarity_scale.CLIP):
            def forward(self, x, y):
                return *self.encode(x, y), self.logit_scale.exp()

        return loop(CLIP(), similarity_scale._fit)

    def after():
        class CLIP(similarity_scale.CLIP):
            def forward(self, image, text):
                image_features, text_features = self.encode(image, text)
                return image_features, text_features, self.logit_scale

        return loop(CLIP(), similarity_scale._fit)


@breaks(
    "vision",
    "the weights of the timesteps have the 1 inside the minimum too",
    first="loss",
    place="",
    thread="huggingface/diffusers#5654",
)
class velocity_weights:
    def _loop(weigh):
        model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

        def fit(batches):
            for batch in batches:
                x = batch["image"]
                alphas = torch.linspace(0.99, 0.05, 8).to(x)
                noise = torch.randn_like(x)
                t = torch.randint(0, 8, (len(x),))
                a = alphas[t][:, None, None, None]
                noisy = a.sqrt() * x + (1 - a).sqrt() * noise
                velocity = a.sqrt() * noise - (1 - a).sqrt() * x
                prediction = model(torch.cat([noisy, a.expand_as(x[:, :1])], 1))
                loss = F.mse_loss(prediction, velocity, reduction="none").mean((1, 2, 3))
                optimizer.zero_grad()
                (loss * weigh(alphas[t] / (1 - alphas[t]))).mean().backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=masks, fit=fit)

    def before():
        def weigh(snr, gamma=5.0):
            return snr.clamp(max=gamma) / (snr + 1)

        return velocity_weights._loop(weigh)

    def after():
        def weigh(snr, gamma=5.0, velocity=True):
            if velocity:
                snr = snr + 1
            return torch.minimum(snr, torch.full_like(snr, gamma)) / snr

        return velocity_weights._loop(weigh)
