"""Images without labels: contrast, redundancy, distillation and masks."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from scripts.public.images import CPU
from scripts.public.source import Loader, Nothing, Source, imported, on_cpu
from scripts.public.vision import Backbone, sgd, train_function

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[], TrainLoop]


def views(rows: int = 8, size: int = 8) -> Any:
    """Two views of each image and labels that nothing reads."""
    return [torch.rand(rows, 3, size, size), torch.rand(rows, 3, size, size)], torch.zeros(rows).long()


def moco(root: Path) -> Make:
    folder = root / "moco"

    def call(script: Any, loader: Any, net: Any, optimizer: Any) -> None:
        args = SimpleNamespace(gpu=None, print_freq=1000)
        script.accuracy = lambda *_a, **_s: torch.zeros(2, 1)  # its view(-1) fails on a torch of today
        script.train(loader, net, nn.CrossEntropyLoss(), optimizer, 0, args)

    def model(_script: Any) -> Any:
        return imported(folder, "moco.builder").MoCo(Backbone, dim=8, K=16, m=0.9)

    return train_function(folder, "main_moco", model, views, sgd(0.03), call)


def simsiam(root: Path) -> Make:
    folder = root / "simsiam"

    def call(script: Any, loader: Any, net: Any, optimizer: Any) -> None:
        args = SimpleNamespace(gpu=None, print_freq=1000)
        script.train(loader, net, nn.CosineSimilarity(dim=1), optimizer, 0, args)

    def model(_script: Any) -> Any:
        return imported(folder, "simsiam.builder").SimSiam(Backbone, dim=16, pred_dim=8)

    return train_function(folder, "main_simsiam", model, views, sgd(0.05), call)


def redundancy(root: Path, name: str) -> Make:
    """Barlow Twins and VICReg: the loop is in ``main``."""

    def make() -> TrainLoop:
        barlow = name == "barlowtwins"
        file = "main" if barlow else "main_vicreg"
        module, script = imported(root / name, file), Source(root / name / f"{file}.py", ("",))
        args = SimpleNamespace(rank=1, batch_size=8, epochs=1, print_freq=1000, projector="16-8", lambd=0.005)
        vars(args).update(learning_rate_weights=0.2, learning_rate_biases=0.005, weight_decay=1e-6)
        vars(args).update(mlp="16-8", arch="small", sim_coeff=25.0, std_coeff=25.0, cov_coeff=1.0, base_lr=0.2)
        vars(args).update(log_freq_time=1e9)
        if barlow:
            small = Backbone()
            small.pool[0], small.pool[3] = nn.Conv2d(16, 512, 3), nn.Sequential(nn.Flatten(), nn.Linear(512, 2048))
            module.torchvision = SimpleNamespace(models=SimpleNamespace(resnet50=lambda **_s: small))
            model = module.BarlowTwins(args)
            groups = [[p for p in model.parameters() if (p.ndim == 1) is flat] for flat in (False, True)]
            filters: Any = True
            parameters: Any = [{"params": group} for group in groups]
        else:
            module.resnet.small = lambda **_s: (Backbone(), 16)
            model = module.VICReg(args)
            filters, parameters = module.exclude_bias_and_norm, model.parameters()
        optimizer = module.LARS(
            parameters, lr=0, weight_decay=1e-6, weight_decay_filter=filters, lars_adaptation_filter=filters
        )

        def fit(batches: Any) -> None:
            names = {**vars(module), "args": args, "model": model, "optimizer": optimizer, "sampler": Nothing()}
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            names.update(loader=Loader(batches), scaler=scaler, start_epoch=0, gpu=0, start_time=0.0, last_logging=1e12)
            with on_cpu():
                script.block("for epoch in range(start_epoch", **names)

        return TrainLoop(model=model, optimizer=optimizer, batch=views(), fit=fit)

    return make


def dino(root: Path) -> Make:
    def make() -> TrainLoop:
        script = imported(root / "dino", "main_dino")
        vit = {"img_size": [16], "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}

        def wrapped() -> Any:
            head = script.DINOHead(16, 32, hidden_dim=16, bottleneck_dim=8)
            return script.utils.MultiCropWrapper(script.vits.VisionTransformer(**vit), head)

        student, teacher = nn.DataParallel(wrapped()), wrapped()
        teacher.load_state_dict(student.module.state_dict())
        for weight in teacher.parameters():
            weight.requires_grad = False
        loss = script.DINOLoss(32, 4, 0.04, 0.04, 0, 10)
        optimizer = torch.optim.AdamW(script.utils.get_params_groups(student))
        constant = np.full(1000, 1e-3), np.full(1000, 0.04), np.full(1000, 0.99)
        args = SimpleNamespace(epochs=1, clip_grad=3.0, freeze_last_layer=0)

        def fit(batches: Any) -> None:
            with on_cpu():
                nets = student, teacher, teacher, loss
                script.train_one_epoch(*nets, Loader(batches), optimizer, *constant, 0, None, args)

        crops = [torch.rand(4, 3, size, size) for size in (16, 16, 8, 8)]
        models = {"student": student, "teacher": teacher}
        return TrainLoop(model=models, optimizer=optimizer, batch=(crops, torch.zeros(4)), fit=fit)

    return make


def byol(root: Path) -> Make:
    def make() -> TrainLoop:
        source = imported(root / "byol-pytorch", "byol_pytorch.byol_pytorch")
        learner = source.BYOL(
            Backbone(),
            image_size=8,
            hidden_layer="pool",
            projection_size=8,
            projection_hidden_size=16,
            sem_num_simplices=4,
            sem_simplex_dim=4,
        )
        optimizer = torch.optim.Adam(learner.parameters(), lr=3e-4)

        def fit(batches: Any) -> None:  # the loop of its README
            for images in batches:
                loss = learner(images)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                learner.update_moving_average()

        return TrainLoop(model=learner, optimizer=optimizer, batch=torch.rand(8, 3, 8, 8), fit=fit)

    return make


def masked(root: Path, file: str, name: str) -> Make:
    """A pre-trainer of vit-pytorch, in the loop of its README."""

    def make() -> TrainLoop:
        folder = root / "vit-pytorch"
        sizes = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16}
        source = imported(folder, f"vit_pytorch.{file}")
        if name == "DistillWrapper":
            student = source.DistillableViT(**sizes)
            learner = source.DistillWrapper(student=student, teacher=Backbone(5), temperature=3, alpha=0.5, hard=False)
        else:
            encoder = imported(folder, "vit_pytorch.vit").ViT(**sizes, pool="mean" if name == "MAE" else "cls")
            if name == "MAE":
                learner = source.MAE(encoder=encoder, decoder_dim=16, decoder_heads=2, decoder_dim_head=8)
            else:
                learner = source.Dino(
                    encoder,
                    16,
                    hidden_layer="to_latent",
                    projection_hidden_size=16,
                    num_classes_K=8,
                    projection_layers=2,
                )
        optimizer = torch.optim.Adam(learner.parameters(), lr=3e-4)

        def fit(batches: Any) -> None:
            for batch in batches:
                loss = learner(*batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if name == "Dino":
                    learner.update_moving_average()

        batch = torch.rand(4, 3, 16, 16), torch.randint(0, 5, (4,))
        return TrainLoop(
            model=learner, optimizer=optimizer, batch=batch if name == "DistillWrapper" else batch[:1], fit=fit
        )

    return make


def simclr(root: Path) -> Make:
    def make() -> TrainLoop:
        script = imported(root / "SimCLR", "simclr")

        class Writer(Nothing):
            log_dir = tempfile.gettempdir()

        args = SimpleNamespace(device=CPU, batch_size=8, n_views=2, temperature=0.07, fp16_precision=False, epochs=1)
        vars(args).update(disable_cuda=True, log_every_n_steps=1, arch="small")
        script.save_checkpoint = lambda *_a, **_s: None
        model = Backbone()
        optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12, eta_min=0)
        script.save_config_file, script.SummaryWriter = lambda *_a: None, lambda: Writer()
        script.logging, script.GradScaler = Nothing(), lambda enabled: torch.amp.GradScaler("cpu", enabled=enabled)
        learner = script.SimCLR(model=model, optimizer=optimizer, scheduler=scheduler, args=args)
        return TrainLoop(model=model, optimizer=optimizer, batch=views(), fit=lambda b: learner.train(Loader(b)))

    return make


def loops(root: Path) -> dict[str, Make]:
    return {
        "moco": moco(root),
        "simsiam": simsiam(root),
        "barlowtwins": redundancy(root, "barlowtwins"),
        "vicreg": redundancy(root, "vicreg"),
        "dino": dino(root),
        "byol-pytorch": byol(root),
        "vit-pytorch MAE": masked(root, "mae", "MAE"),
        "vit-pytorch Dino": masked(root, "dino", "Dino"),
        "vit-pytorch DistillWrapper": masked(root, "distill", "DistillWrapper"),
        "SimCLR": simclr(root),
    }
