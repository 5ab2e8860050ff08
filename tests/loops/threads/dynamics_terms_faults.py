"""Terms that are reported and not trained as they are reported."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


class RecordingProbe:
    def __init__(self):
        self.features = []

    def __call__(self, module, inputs, output):
        self.features.append(output.detach())

    def clear(self):
        self.features.clear()


class PerceptualLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.net.requires_grad_(False).eval()
        self.probe = RecordingProbe()
        for layer in (self.net[1], self.net[3]):
            layer.register_forward_hook(self.probe)

    def features(self, images):
        self.probe.clear()
        self.net(images)
        return list(self.probe.features)

    def forward(self, fake, real):
        pairs = zip(self.features(fake), self.features(real), strict=True)
        return sum(F.mse_loss(a, b) for a, b in pairs)


@fault(
    "terms",
    "the probe detaches the features it records, so that the perceptual term (weight 1) has no gradient",
    thread="myscience/open-genie#6",
    check="loss_components",
)
def video_tokenizer(perceptual_weight=1.0):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 8, 2, stride=2),
        nn.SiLU(),
        nn.Conv2d(8, 1, 1),
    )
    perceptual = PerceptualLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compute_loss(model, images):
        recon = model(images)
        return {"rec": F.mse_loss(recon, images), "perceptual": (perceptual_weight, perceptual(recon, images))}

    def train(batches):
        for images in batches:
            losses = compute_loss(model, images)
            loss = losses["rec"] + losses["perceptual"][0] * losses["perceptual"][1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=lambda n: [torch.rand(6, 1, 8, 8) for _ in range(n)],
        fit=train,
        parts=compute_loss,
    )


class ReconUpdate:
    """A client's update with an adversarial term against the features of another site."""

    def __init__(self, lambda_adv=0.5):
        self.net_g = nn.ModuleDict({"enc": nn.Linear(16, 24), "dec": nn.Linear(24, 16)})
        self.net_d = nn.Sequential(nn.Linear(24, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
        self.opt_g = torch.optim.Adam(self.net_g.parameters(), lr=1e-3)
        self.opt_d = torch.optim.Adam(self.net_d.parameters(), lr=1e-3)
        self.lambda_adv = lambda_adv
        self.history = []

    def terms(self, models, batch):
        source, _ = batch
        features = F.leaky_relu(models["g"]["enc"](source), 0.2)
        recon = F.l1_loss(models["g"]["dec"](features), source)
        return {"recon": recon, "adv": (self.lambda_adv, F.softplus(-models["d"](features)).mean())}

    def train(self, batches):
        models = {"g": self.net_g, "d": self.net_d}
        for source, target in batches:
            with torch.no_grad():
                f_source, f_target = (F.leaky_relu(self.net_g["enc"](x), 0.2) for x in (source, target))
            loss_d = F.softplus(-self.net_d(f_target)).mean() + F.softplus(self.net_d(f_source)).mean()
            self.opt_d.zero_grad()
            loss_d.backward()
            self.opt_d.step()
            terms = self.terms(models, (source, target))
            loss_adv_g = terms["adv"][1].detach().item()
            self.history = [*self.history[-9:], loss_adv_g]
            loss = terms["recon"] + self.lambda_adv * loss_adv_g
            self.opt_g.zero_grad()
            loss.backward()
            self.opt_g.step()


@fault(
    "terms",
    "loss_adv_g is made a float with detach().item() before it is added: the adversarial term trains nothing",
    thread="guopengf/FL-MRCM#10",
    check="loss_components",
)
def federated_reconstruction():
    update = ReconUpdate()
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 16) + 1)
    return TrainLoop(
        model={"g": update.net_g, "d": update.net_d},
        optimizer=[update.opt_g, update.opt_d],
        batches=DataLoader(data, batch_size=8, shuffle=True),
        fit=update.train,
        parts=lambda model, batch: update.terms({"g": update.net_g, "d": update.net_d}, batch),
    )
