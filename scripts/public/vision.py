"""Images: classifiers, self-supervision, detection, generation."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pytest_trainloop import TrainLoop
from scripts.public.images import ARGS, CPU, digits, gan
from scripts.public.source import Loader, Nothing, Source, imported, on_cpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[], TrainLoop]


class Backbone(nn.Module):
    """A small encoder where a script takes one of torchvision by name."""

    def __init__(self, num_classes: int = 16, zero_init_residual: bool = False) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.pool = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc: nn.Module = nn.Linear(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.conv(x)))


def colors(rows: int = 4, size: int = 32, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(rows, 3, size, size), torch.randint(0, classes, (rows,))


def train_function(
    folder: Path, name: str, model: Callable[[Any], Any], batch: Any, optimizer: Any, call: Callable[..., Any]
) -> Make:
    """A script whose module has a function that trains for one epoch."""

    def make() -> TrainLoop:
        script = imported(folder, name)
        net = model(script)
        steps = optimizer(net)

        def fit(batches: Any) -> None:
            with on_cpu():
                call(script, Loader(batches), net, steps)

        return TrainLoop(model=net, optimizer=steps, batch=batch(), fit=fit)

    return make


def sgd(lr: float, momentum: float = 0.9, decay: float = 1e-4) -> Any:
    return lambda net: torch.optim.SGD(net.parameters(), lr, momentum=momentum, weight_decay=decay)


def adam(lr: float, **settings: Any) -> Any:
    return lambda net: torch.optim.Adam(net.parameters(), lr, **settings)


def cifar(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "pytorch-cifar"
        net = imported(folder, "models.lenet").LeNet()
        skip = ("datasets.CIFAR10", "DataLoader(", "from models", "from utils", "SimpleDLA()")
        script = Source(folder / "main.py", skip, net=net, progress_bar=lambda *_a: None)

        def fit(batches: Any) -> None:
            script.names["trainloader"] = Loader(batches)
            script.names["train"](0)
            script.scheduler.step()

        return TrainLoop(
            model=net, optimizer=script.optimizer, scheduler=script.scheduler, batch=colors(), fit=fit, epochs=200
        )

    return make


def cifar100(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "pytorch-cifar100"
        script = imported(folder, "train")
        script.net = imported(folder, "models.squeezenet").squeezenet(class_num=10)
        script.args, script.writer = SimpleNamespace(gpu=False, b=4, warm=1), Nothing()
        script.loss_function = nn.CrossEntropyLoss()
        script.optimizer = torch.optim.SGD(script.net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        script.warmup_scheduler = script.WarmUpLR(script.optimizer, 12 * script.args.warm)
        names = vars(script).copy()

        def fit(batches: Any) -> None:
            vars(script).update(names, cifar100_training_loader=Loader(batches))
            script.train(1)

        return TrainLoop(model=script.net, optimizer=script.optimizer, batch=colors(), fit=fit)

    return make


def forward_forward(root: Path) -> Make:
    """The layers train one after the other, each with its own optimizer; their ``train`` is not torch's."""

    def make() -> TrainLoop:
        script = imported(root / "examples/mnist_forward_forward", "main")
        script.device = CPU
        script.args = SimpleNamespace(lr=0.03, threshold=2, epochs=2, log_interval=10)
        net = script.Net([36, 16, 16])

        def fit(batches: Any) -> None:
            for x, y in batches:
                net.train(script.overlay_y_on_x(x, y), script.overlay_y_on_x(x, script.get_y_neg(y)))

        batch = torch.rand(8, 36), torch.randint(0, 10, (8,))
        return TrainLoop(model=net.layers, optimizer=[layer.opt for layer in net.layers], batch=batch, fit=fit)

    return make


def detr(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "detr"
        script, engine = imported(folder, "models.detr"), imported(folder, "engine")
        backbone = imported(folder, "models.backbone")

        class Small(nn.Module):
            num_channels = 8

            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())

            def forward(self, images: Any) -> Any:
                features = self.body(images.tensors)
                mask = nn.functional.interpolate(images.mask[None].float(), size=features.shape[-2:]).to(torch.bool)[0]
                return {"0": type(images)(features, mask)}

        position = imported(folder, "models.position_encoding").PositionEmbeddingSine(8, normalize=True)
        joined = backbone.Joiner(Small(), position)
        joined.num_channels = 8
        transformer = imported(folder, "models.transformer").Transformer(
            d_model=16,
            nhead=2,
            num_encoder_layers=1,
            num_decoder_layers=2,
            dim_feedforward=16,
            return_intermediate_dec=True,
        )
        model = script.DETR(joined, transformer, num_classes=3, num_queries=5, aux_loss=True)
        matcher = imported(folder, "models.matcher").HungarianMatcher(cost_class=1, cost_bbox=5, cost_giou=2)
        weights = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}
        weights.update({f"{name}_0": weight for name, weight in weights.items()})
        criterion = script.SetCriterion(3, matcher, weights, 0.1, ["labels", "boxes", "cardinality"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)

        def fit(batches: Any) -> None:
            engine.train_one_epoch(model, criterion, Loader(batches), optimizer, CPU, 0, 0.1)

        targets = [{"labels": torch.randint(0, 3, (n,)), "boxes": 0.2 + 0.3 * torch.rand(n, 4)} for n in (2, 1)]
        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.rand(2, 3, 16, 16), targets), fit=fit)

    return make


def dit(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "DiT"
        module, script = imported(folder, "train"), Source(folder / "train.py", ("",))
        net = imported(folder, "models").DiT(
            input_size=8, patch_size=4, hidden_size=16, depth=1, num_heads=2, num_classes=4
        )
        ema, model = copy.deepcopy(net), nn.DataParallel(net)
        module.requires_grad(ema, False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
        module.update_ema(ema, model.module, decay=0)
        latent = SimpleNamespace(encode=lambda x: SimpleNamespace(latent_dist=SimpleNamespace(sample=x.clone)))
        diffusion = module.create_diffusion(timestep_respacing="")
        args = SimpleNamespace(epochs=1, log_every=10**6, ckpt_every=10**6)

        def fit(batches: Any) -> None:
            model.train()
            ema.eval()
            names = {**vars(module), "args": args, "model": model, "ema": ema, "opt": optimizer, "vae": latent}
            names.update(sampler=Nothing(), logger=Nothing(), loader=Loader(batches), diffusion=diffusion)
            script.block(
                "for epoch in range(args.epochs)", **names, device=CPU, running_loss=0, log_steps=0, train_steps=0
            )

        batch = torch.randn(4, 4, 8, 8), torch.randint(0, 4, (4,))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def fixmatch(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "FixMatch-pytorch"
        script = imported(folder, "train")
        model = imported(folder, "models.wideresnet").WideResNet(num_classes=4, depth=10, widen_factor=1, drop_rate=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
        scheduler = script.get_cosine_schedule_with_warmup(optimizer, 0, 1000)
        args = SimpleNamespace(amp=False, world_size=1, start_epoch=0, epochs=1, no_progress=True, local_rank=0, mu=2)
        vars(args).update(device=CPU, T=1.0, threshold=0.3, lambda_u=1.0, use_ema=True, out="", writer=Nothing())
        ema = imported(folder, "models.ema").ModelEMA(args := SimpleNamespace(**vars(args)), model, 0.99)

        class Stream(Loader):
            def __iter__(self) -> Any:
                return self

            def next(self) -> Any:
                return next(self.batches)

            __next__ = next

        def fit(batches: Any) -> None:
            labelled, unlabelled = itertools.tee(batches)
            rounds = [(x, u) for x, u in zip(labelled, unlabelled, strict=True)]
            args.eval_step = len(rounds)
            script.test, script.save_checkpoint, script.best_acc = lambda *_a: (0.0, 0.0), lambda *_a: None, 0
            first, second = Stream(iter([x[0] for x, _ in rounds])), Stream(iter([u[1] for _, u in rounds]))
            script.train(args, first, second, None, model, optimizer, ema, scheduler)

        labels = torch.randint(0, 4, (4,))
        batch = (torch.rand(4, 3, 8, 8), labels), ((torch.rand(8, 3, 8, 8), torch.rand(8, 3, 8, 8)), torch.zeros(8))
        return TrainLoop(model=model, optimizer=optimizer, scheduler=scheduler, batch=batch, fit=fit, steps=1000)

    return make


def factor_vae(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "FactorVAE"
        script, nets = imported(folder, "solver"), imported(folder, "model")
        solver = script.Solver.__new__(script.Solver)
        solver.VAE, solver.D = nets.FactorVAE1(4), nets.Discriminator(4)
        solver.optim_VAE = torch.optim.Adam(solver.VAE.parameters(), lr=1e-4, betas=(0.9, 0.999))
        solver.optim_D = torch.optim.Adam(solver.D.parameters(), lr=1e-4, betas=(0.5, 0.9))
        solver.nets, solver.device, solver.batch_size, solver.gamma = [solver.VAE, solver.D], "cpu", 4, 6.4
        solver.global_iter, solver.pbar, solver.viz_on = 0, Nothing(), False
        solver.print_iter = solver.ckpt_save_iter = 10**9

        def fit(batches: Any) -> None:
            rounds = list(batches)
            solver.data_loader, solver.max_iter = rounds, solver.global_iter + len(rounds)
            solver.train()

        batch = (torch.rand(4, 1, 64, 64) < 0.5).float(), (torch.rand(4, 1, 64, 64) < 0.5).float()
        optimizers = [solver.optim_VAE, solver.optim_D]
        return TrainLoop(model={"VAE": solver.VAE, "D": solver.D}, optimizer=optimizers, batch=batch, fit=fit)

    return make


def vq_vae(root: Path) -> Make:
    folder = root / "vq-vae-2-pytorch"

    def call(script: Any, loader: Any, net: Any, optimizer: Any) -> None:
        script.utils, script.dist.is_primary = Nothing(), lambda: False
        script.train(0, loader, net, optimizer, None, CPU)

    def model(_script: Any) -> Any:
        return imported(folder, "vqvae").VQVAE(channel=16, n_res_block=1, n_res_channel=8, embed_dim=8, n_embed=16)

    return train_function(folder, "train_vqvae", model, lambda: colors(4, 16), adam(3e-4), call)


def loops(root: Path) -> dict[str, Make]:
    examples, quiet = root / "examples", SimpleNamespace(no_accel=True, print_freq=1000, half=False)

    def imagenet(script: Any, loader: Any, net: Any, optimizer: Any) -> None:
        script.train(loader, net, nn.CrossEntropyLoss(), optimizer, 0, CPU, quiet)

    def resnet(script: Any, loader: Any, net: Any, optimizer: Any) -> None:
        script.args = quiet
        script.train(loader, net, nn.CrossEntropyLoss(), optimizer, 0)

    def siamese(script: Any, loader: Any, net: Any, optimizer: Any) -> None:
        script.train(ARGS, net, CPU, loader, optimizer, 1)

    def pairs() -> Any:
        return digits(4)[0], digits(4)[0], torch.tensor([0.0, 1.0, 1.0, 0.0])

    def small(script: Any) -> Any:
        return script.models.shufflenet_v2_x0_5(num_classes=10)

    def resnet20(_script: Any) -> Any:
        return imported(root / "pytorch_resnet_cifar10", "resnet").resnet20()

    return {
        "pytorch/examples imagenet": train_function(examples / "imagenet", "main", small, colors, sgd(0.1), imagenet),
        "pytorch/examples siamese_network": train_function(
            examples / "siamese_network",
            "main",
            lambda s: s.SiameseNetwork(),
            pairs,
            lambda net: torch.optim.Adadelta(net.parameters(), lr=1.0),
            siamese,
        ),
        "pytorch/examples mnist_forward_forward": forward_forward(root),
        "pytorch-cifar": cifar(root),
        "pytorch-cifar100": cifar100(root),
        "pytorch_resnet_cifar10": train_function(
            root / "pytorch_resnet_cifar10", "trainer", resnet20, lambda: colors(4, 16), sgd(0.1), resnet
        ),
        "detr": detr(root),
        "DiT": dit(root),
        "FixMatch": fixmatch(root),
        "PyTorch-GAN wgan": gan(root, "wgan", n_critic=1),
        "PyTorch-GAN ebgan": gan(root, "ebgan"),
        "PyTorch-GAN sgan": gan(root, "sgan"),
        "FactorVAE": factor_vae(root),
        "vq-vae-2-pytorch": vq_vae(root),
    }
