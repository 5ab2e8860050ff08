"""Segmentation in small that is right, and looks odd."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import right


def scans(n=24, classes=3, size=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    grid = torch.arange(size, dtype=torch.float32)
    images, masks = 0.1 * torch.randn(n, 1, size, size, generator=g), torch.zeros(n, size, size, dtype=torch.long)
    for k in range(1, classes):
        at = 2 + (size - 4) * torch.rand(n, 2, generator=g)
        r = 1.5 + 1.5 * torch.rand(n, generator=g)
        d = (grid[None, :, None] - at[:, 0, None, None]) ** 2 + (grid[None, None, :] - at[:, 1, None, None]) ** 2
        inside = d < r[:, None, None] ** 2
        masks[inside] = k
        images[:, 0][inside] += 1.0 if k == 1 else -1.0
    return images, masks


class MiniUNet(nn.Module):
    def __init__(self, classes=3, width=8):
        super().__init__()
        self.enc1 = nn.Conv2d(1, width, 3, padding=1)
        self.enc2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec = nn.Conv2d(2 * width, width, 3, padding=1)
        self.outc = nn.Conv2d(width, classes, 1)

    def features(self, x):
        a = F.relu(self.enc1(x))
        b = F.relu(self.enc2(a))
        return b, F.relu(self.dec(torch.cat([a, self.up(b)], 1)))

    def forward(self, x):
        return self.outc(self.features(x)[1])


def train(model, optimizer, criterion, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()


def loop(model, criterion, data, lr=2e-3, batch_size=6, **fields):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(*data), batch_size=batch_size, shuffle=True)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=lambda batches: train(model, optimizer, criterion, batches),
        **fields,
    )


@right(
    "segmentation",
    "the lowest of three outputs has the weight 0 by design, and its head stays as it is; the others share 1",
    thread="MIC-DKFZ/nnUNet#329",
)
def lowest_output_unused():
    class DeepUNet(MiniUNet):
        def __init__(self):
            super().__init__()
            self.mid_head, self.low_head = nn.Conv2d(16, 3, 1), nn.Conv2d(16, 3, 1)

        def forward(self, x):
            low, high = self.features(x)
            return [self.outc(high), self.mid_head(low), self.low_head(F.avg_pool2d(low, 2))]

    weights = torch.tensor([1 / 2**i for i in range(3)])
    weights[-1] = 0
    weights = (weights / weights.sum()).tolist()

    def criterion(outputs, y):
        targets = [y, y[:, ::2, ::2], y[:, ::4, ::4]]
        return sum(w * F.cross_entropy(o, t) for w, o, t in zip(weights, outputs, targets, strict=True) if w != 0)

    return loop(DeepUNet(), criterion, scans(seed=15))
