"""Images: classifiers, auto-encoders, GANs, segmentation, metric learning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop import TrainLoop
from scripts.public.source import Loader, Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[], TrainLoop]

DATA = ("datasets.", "DataLoader(", "makedirs")
ARGS = SimpleNamespace(log_interval=10, dry_run=False)
CPU = torch.device("cpu")


def digits(rows: int = 8, size: int = 28, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(rows, channels, size, size), torch.randint(0, 10, (rows,))


def classifier(path: Path) -> Make:
    def make() -> TrainLoop:
        script = Source(path, DATA)
        model = script.Net()
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=digits(),
            fit=lambda batches: script.names["train"](ARGS, model, CPU, Loader(batches), optimizer, 1),
        )

    return make


def vae(root: Path) -> Make:
    def make() -> TrainLoop:
        script = Source(root / "examples/vae/main.py", DATA)

        def fit(batches: Any) -> None:
            script.names["train_loader"] = Loader(batches)
            script.names["train"](1)

        return TrainLoop(model=script.model, optimizer=script.optimizer, batch=digits(), fit=fit)

    return make


def super_resolution(root: Path) -> Make:
    def make() -> TrainLoop:
        path = root / "examples/super_resolution/model.py"
        script = Source(path)
        main = Source(
            root / "examples/super_resolution/main.py",
            ("parse", "get_training_set", "get_test_set", "DataLoader", "raise", "for epoch"),
            opt=SimpleNamespace(upscale_factor=3, seed=1, lr=1e-3, accel=False),
            Net=script.Net,
        )

        def fit(batches: Any) -> None:
            main.names["training_data_loader"] = Loader(batches)
            main.names["train"](1)

        batch = torch.rand(4, 1, 8, 8), torch.rand(4, 1, 24, 24)
        return TrainLoop(model=main.model, optimizer=main.optimizer, batch=batch, fit=fit)

    return make


def gan(root: Path, name: str, loader: str = "dataloader", **settings: Any) -> Make:
    def make() -> TrainLoop:
        path = root / f"PyTorch-GAN/implementations/{name}/{name}.py"
        sizes = {"img_size": 16, "n_epochs": 1, "latent_dim": 8, "sample_interval": 10**6, "batch_size": 8}
        script = Source(path, DATA, {**sizes, **settings})
        optimizers = [v for v in script.names.values() if isinstance(v, torch.optim.Optimizer)]
        models = [v for v in script.names.values() if isinstance(v, nn.Module) and list(v.parameters())]
        size = script.opt.img_size
        batch = 2 * torch.rand(8, 1, size, size) - 1, torch.randint(0, 10, (8,))
        script.names.setdefault("batches_done", 0)
        return TrainLoop(
            model=models,
            optimizer=optimizers,
            batch=batch,
            fit=lambda batches: script.train(**{loader: Loader(batches)}, save_image=lambda *_a, **_k: None),
        )

    return make


def unet(root: Path, classes: int) -> Make:
    def make() -> TrainLoop:
        class Small(nn.Module):
            n_channels, n_classes = 3, classes

            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, classes, 1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.body(x)

        folder = root / "Pytorch-UNet"
        dice = Source(folder / "utils/dice_score.py")
        script = Source(folder / "train.py", ("get_args",))
        model = Small()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
        optim = SimpleNamespace(RMSprop=lambda *_a, **_k: optimizer, lr_scheduler=torch.optim.lr_scheduler)
        script.names.update(
            dice_loss=dice.dice_loss,
            random_split=lambda *_a, **_k: ([], []),
            BasicDataset=lambda *_a: range(96),
            CarvanaDataset=lambda *_a: range(96),
            optim=optim,
        )

        def fit(batches: Any) -> None:
            script.names["DataLoader"] = lambda *_a, **_k: Loader(batches)
            script.train_model(model, CPU, epochs=1, batch_size=1000, save_checkpoint=False)

        image, mask = torch.rand(4, 3, 8, 8), torch.randint(0, max(classes, 2), (4, 8, 8))
        return TrainLoop(model=model, optimizer=optimizer, batch={"image": image, "mask": mask}, fit=fit)

    return make


class Embedding(nn.Module):
    def __init__(self, out: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.PReLU(), nn.Linear(32, out))

    def forward(self, *images: torch.Tensor) -> Any:
        found = tuple(map(self.body, images))
        return found[0] if len(found) == 1 else found


def metric(root: Path, kind: str) -> Make:
    def make() -> TrainLoop:
        folder = root / "siamese-triplet"
        losses, trainer = Source(folder / "losses.py"), Source(folder / "trainer.py")
        model = Embedding()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        criterion = losses.TripletLoss(1.0) if kind == "triplet" else losses.ContrastiveLoss(1.0)
        images = tuple(torch.rand(8, 8, 8) for _ in range(3 if kind == "triplet" else 2))
        target = [] if kind == "triplet" else torch.randint(0, 2, (8,))
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=(images, target),
            fit=lambda batches: trainer.train_epoch(Loader(batches), model, criterion, optimizer, False, 50, []),
        )

    return make


def supcon(root: Path, method: str) -> Make:
    def make() -> TrainLoop:
        class Normalised(Embedding):
            def forward(self, images: torch.Tensor) -> torch.Tensor:
                return nn.functional.normalize(self.body(images), dim=1)

        folder = root / "SupContrast"
        losses = Source(folder / "losses.py")
        script = Source(folder / "main_supcon.py", ("apex",))
        meter = SimpleNamespace(update=lambda *_a: None, val=0.0, avg=0.0)
        script.names.update(AverageMeter=lambda: meter, warmup_learning_rate=lambda *_a: None)
        model, criterion = Normalised(), losses.SupConLoss(temperature=0.07)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        settings = SimpleNamespace(method=method, print_freq=1000)
        batch = (torch.rand(8, 8, 8), torch.rand(8, 8, 8)), torch.randint(0, 3, (8,))
        return TrainLoop(
            model=model,
            optimizer=optimizer,
            batch=batch,
            fit=lambda batches: script.names["train"](Loader(batches), model, criterion, optimizer, 1, settings),
        )

    return make


def segmentation(root: Path, file: str, name: str, softmax: bool = False) -> Make:
    """One criterion of SegLossOdyssey behind a small net over volumes or images."""

    def make() -> TrainLoop:
        source = Source(root / f"SegLossOdyssey/losses_pytorch/{file}.py")
        criterion = source.names[name](**({"apply_nonlin": lambda x: torch.softmax(x, 1)} if softmax else {}))
        model = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        def fit(batches: Any) -> None:
            for image, label in batches:
                optimizer.zero_grad()
                loss = criterion(model(image), label)
                loss.backward()
                optimizer.step()

        batch = torch.rand(2, 1, 4, 4, 4), torch.randint(0, 3, (2, 1, 4, 4, 4))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def loops(root: Path) -> dict[str, Make]:
    examples = root / "examples"
    return {
        "pytorch/examples mnist": classifier(examples / "mnist/main.py"),
        "pytorch/examples mnist_rnn": classifier(examples / "mnist_rnn/main.py"),
        "pytorch/examples vae": vae(root),
        "pytorch/examples super_resolution": super_resolution(root),
        "PyTorch-GAN gan": gan(root, "gan"),
        "PyTorch-GAN wgan_gp": gan(root, "wgan_gp", n_critic=1),
        "PyTorch-GAN dragan": gan(root, "dragan", "mnist_loader", img_size=32),
        "PyTorch-GAN infogan": gan(root, "infogan", img_size=32),
        "PyTorch-GAN cgan": gan(root, "cgan"),
        "PyTorch-GAN lsgan": gan(root, "lsgan", img_size=32),
        "PyTorch-GAN acgan": gan(root, "acgan", img_size=32),
        "Pytorch-UNet two classes": unet(root, 2),
        "Pytorch-UNet one class": unet(root, 1),
        "siamese-triplet contrastive": metric(root, "contrastive"),
        "siamese-triplet triplet": metric(root, "triplet"),
        "SupContrast SupCon": supcon(root, "SupCon"),
        "SupContrast SimCLR": supcon(root, "SimCLR"),
        "SegLossOdyssey SoftDiceLoss": segmentation(root, "dice_loss", "SoftDiceLoss", softmax=True),
        "SegLossOdyssey GDiceLoss": segmentation(root, "dice_loss", "GDiceLoss", softmax=True),
        "SegLossOdyssey IoULoss": segmentation(root, "dice_loss", "IoULoss", softmax=True),
        "SegLossOdyssey TverskyLoss": segmentation(root, "dice_loss", "TverskyLoss", softmax=True),
        "SegLossOdyssey SSLoss": segmentation(root, "dice_loss", "SSLoss", softmax=True),
        "SegLossOdyssey FocalLoss": segmentation(root, "focal_loss", "FocalLoss", softmax=True),
        "SegLossOdyssey TopKLoss": segmentation(root, "ND_Crossentropy", "TopKLoss"),
        "SegLossOdyssey LovaszSoftmax": segmentation(root, "lovasz_loss", "LovaszSoftmax"),
    }
