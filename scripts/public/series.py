"""Series, flows, physics, survival, meta-learning, rendering, world models, and scripts of tutorials."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from pytest_trainloop import TrainLoop
from scripts.public.images import CPU, DATA, digits
from scripts.public.source import Loader, Nothing, Source, definitions, imported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[], TrainLoop]


def forecaster(root: Path, name: str) -> Make:
    """``Exp.train`` of Informer2020, Autoformer and PatchTST, with its evaluations and its early stopping."""
    places = {
        "Informer2020": ("Informer2020", "exp.exp_informer", "Exp_Informer", "informer"),
        "Autoformer": ("Autoformer", "exp.exp_main", "Exp_Main", "Autoformer"),
        "PatchTST": ("PatchTST/PatchTST_supervised", "exp.exp_main", "Exp_Main", "PatchTST"),
    }

    def make() -> TrainLoop:
        folder, module, experiment, model = places[name]
        script = imported(root / folder, module)
        sizes = {"seq_len": 16, "label_len": 8, "pred_len": 8, "enc_in": 3, "dec_in": 3, "c_out": 3, "d_model": 16}
        sizes.update(n_heads=2, e_layers=1, d_layers=1, d_ff=16, factor=2, moving_avg=5, patch_len=4, stride=2)
        kinds: dict[str, Any] = {"features": "M", "freq": "h", "embed": "timeF", "activation": "gelu", "attn": "prob"}
        kinds.update(dropout=0.05, fc_dropout=0.05, head_dropout=0.0, padding_patch="end", revin=1, affine=0)
        kinds.update(subtract_last=0, decomposition=0, kernel_size=5, individual=0, distil=True, mix=True, padding=0)
        kinds.update(output_attention=False, use_amp=False, use_gpu=False, use_multi_gpu=False, inverse=False)
        plan = {"learning_rate": 1e-4, "train_epochs": 1, "patience": 3, "lradj": "type1", "pct_start": 0.3}
        args = SimpleNamespace(**sizes, **kinds, **plan, model=model, checkpoints=tempfile.gettempdir())
        learner = getattr(script, experiment)(args)

        def fit(batches: Any) -> None:
            learner._get_data = lambda flag: (None, Loader(batches if flag == "train" else [batch]))
            with tempfile.TemporaryDirectory() as folder, patch.object(np, "Inf", np.inf, create=True):
                args.checkpoints = folder
                learner.train("")

        batch = torch.randn(4, 16, 3), torch.randn(4, 16, 3), torch.rand(4, 16, 4) - 0.5, torch.rand(4, 16, 4) - 0.5
        return TrainLoop(model=learner.model, batch=batch, fit=fit)

    return make


def n_beats(root: Path) -> Make:
    def make() -> TrainLoop:
        source = imported(root / "n-beats", "nbeats_pytorch.model")
        sizes = {"forecast_length": 4, "backcast_length": 8, "hidden_layer_units": 16, "nb_blocks_per_stack": 2}
        model = source.NBeatsNet(**sizes)
        model.compile(loss="mae", optimizer="adam")

        def fit(batches: Any) -> None:
            for x, y in batches:
                rows = x.numpy(), y.numpy()
                model.fit(*rows, validation_data=rows, epochs=1, batch_size=len(x))

        batch = torch.rand(8, 8), torch.rand(8, 4)
        return TrainLoop(model=model, optimizer=model._opt, batch=batch, fit=fit)

    return make


def adding(root: Path) -> Make:
    """The adding problem of TCN: each batch is the whole data of one epoch."""

    def make() -> TrainLoop:
        net = imported(root / "TCN", "TCN.adding_problem.model").TCN
        source = definitions(root / "TCN/TCN/adding_problem/add_test.py")
        model = net(2, 1, [8, 8], kernel_size=3, dropout=0.1)
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        args = SimpleNamespace(clip=-1, log_interval=100)
        source.names.update(model=model, optimizer=optimizer, args=args, lr=4e-3, F=nn.functional, torch=torch)

        def fit(batches: Any) -> None:
            for epoch, (x, y) in enumerate(batches):
                source.names.update(X_train=x, Y_train=y, batch_size=len(x))
                source.names["train"](epoch)

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.rand(8, 2, 12), torch.rand(8, 1)), fit=fit)

    return make


def glow(root: Path) -> Make:
    """The first batch of a run sets the scales of ActNorm and is not trained on."""

    def make() -> TrainLoop:
        folder = root / "glow-pytorch"
        script = imported(folder, "train")
        single = imported(folder, "model").Glow(3, 2, 1, affine=True, conv_lu=True)
        model = nn.DataParallel(single)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        args = SimpleNamespace(
            path="", batch=4, img_size=8, n_bits=5, n_flow=2, n_block=1, n_sample=1, temp=0.7, lr=1e-4
        )

        class Progress(list):
            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda *_a: None  # noqa: E731
            set_description = staticmethod(lambda _text: None)

        def fit(batches: Any) -> None:
            rounds = list(batches)
            script.sample_data = lambda *_a: iter([rounds[0], *rounds] if rounds else [])
            script.device, args.iter = CPU, len(rounds) + 1
            script.tqdm = lambda rounds: Progress(rounds)
            if rounds:
                script.train(args, model, optimizer)

        return TrainLoop(model=model, optimizer=optimizer, batch=(torch.rand(4, 3, 8, 8), torch.zeros(4)), fit=fit)

    return make


def real_nvp(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "real-nvp"
        script, models = imported(folder, "train"), imported(folder, "models")
        net = models.RealNVP(num_scales=1, in_channels=1, mid_channels=8, num_blocks=1)
        util, loss = imported(folder, "util"), models.RealNVPLoss()
        optimizer = torch.optim.Adam(util.get_param_groups(net, 5e-5, norm_suffix="weight_g"), lr=1e-3)

        class Bar(Nothing):
            __enter__ = lambda self: self  # noqa: E731
            __exit__ = lambda *_a: None  # noqa: E731

        script.tqdm = lambda **_s: Bar()

        def fit(batches: Any) -> None:
            script.train(0, net, Loader(batches), CPU, optimizer, loss, 100.0)

        return TrainLoop(model=net, optimizer=optimizer, batch=(torch.rand(4, 1, 8, 8), torch.zeros(4)), fit=fit)

    return make


def maf(root: Path, name: str) -> Make:
    def make() -> TrainLoop:
        script = imported(root / "normalizing_flows", "maf")
        if name == "MAF":
            model = script.MAF(2, 6, 16, 1, None, "relu", "sequential", batch_norm=True)
        elif name == "RealNVP":
            model = script.RealNVP(2, 6, 16, 1, None, batch_norm=True)
        else:
            model = script.MADEMOG(3, 6, 16, 1, None, "relu", "sequential")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=1e-6)
        args = SimpleNamespace(device=CPU, cond_label_size=None, log_interval=1000, start_epoch=0, n_epochs=1)

        def fit(batches: Any) -> None:
            script.train(model, Loader([b] for b in batches), optimizer, 0, args)

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.randn(16, 6), fit=fit)

    return make


def nerf(root: Path) -> Make:
    """The core of its loop: rays of many images, coarse and fine networks, a rate that decays by hand."""

    def make() -> TrainLoop:
        source = imported(root / "nerf-pytorch", "run_nerf")
        args = SimpleNamespace(multires=4, multires_views=2, i_embed=0, use_viewdirs=True, N_importance=4, N_samples=6)
        vars(args).update(netdepth=2, netwidth=16, netdepth_fine=2, netwidth_fine=16, netchunk=10**6, lrate=5e-4)
        vars(args).update(ft_path=None, no_reload=True, perturb=1.0, white_bkgd=False, raw_noise_std=0.0, lindisp=False)
        vars(args).update(
            dataset_type="blender", no_ndc=True, lrate_decay=250, chunk=10**6, N_rand=8, no_batching=False
        )
        vars(args).update(i_print=10**9, i_img=10**9, i_weights=10**9, i_testset=10**9, i_video=10**9)
        source.device = CPU
        with tempfile.TemporaryDirectory() as folder:
            args.basedir, args.expname = folder, ""
            kwargs, _, _, _, optimizer = source.create_nerf(args)
        kwargs.update(near=2.0, far=6.0)
        script = Source(root / "nerf-pytorch/run_nerf.py", ("",))
        models = {"coarse": kwargs["network_fn"], "fine": kwargs["network_fine"]}
        camera = np.array([[8.0, 0, 4], [0, 8.0, 4], [0, 0, 1]])

        def fit(batches: Any) -> None:
            rounds = list(batches)
            rays = torch.cat(rounds) if rounds else torch.zeros(0, 3, 3)
            names = {**vars(source), "args": args, "use_batching": True, "rays_rgb": rays, "i_batch": 0, "H": 8, "W": 8}
            names.update(start=1, N_iters=len(rounds) + 1, N_rand=len(rounds[0]) if rounds else 1, K=camera)
            names.update(render_kwargs_train=kwargs, optimizer=optimizer, global_step=0, trange=range)
            script.block("for i in trange(start", **names)

        return TrainLoop(model=models, optimizer=optimizer, batch=torch.rand(8, 3, 3), fit=fit)

    return make


def maml(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "MAML-Pytorch"
        config: list[Any] = [("conv2d", [8, 1, 3, 3, 2, 0]), ("relu", [True]), ("bn", [8]), ("flatten", [])]
        config.append(("linear", [3, 8 * 3 * 3]))
        args = SimpleNamespace(update_lr=0.4, meta_lr=1e-3, n_way=3, k_spt=1, k_qry=4, task_num=4, update_step=2)
        vars(args).update(update_step_test=2, imgc=1, imgsz=8)
        learner = imported(folder, "meta").Meta(args, config)

        def fit(batches: Any) -> None:
            for batch in batches:
                learner(*batch)

        support = torch.rand(4, 3, 1, 8, 8), torch.arange(3).repeat(4, 1)
        query = torch.rand(4, 12, 1, 8, 8), torch.randint(0, 3, (4, 12))
        return TrainLoop(model=learner, optimizer=learner.meta_optim, batch=(*support, *query), fit=fit)

    return make


def world_vae(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "world-models"
        source = definitions(folder / "trainvae.py")
        model = imported(folder, "models.vae").VAE(3, 8)
        optimizer = torch.optim.Adam(model.parameters())
        source.names.update(model=model, optimizer=optimizer, dataset_train=Nothing(), device=CPU)

        def fit(batches: Any) -> None:
            source.names["train_loader"] = Loader(batches)
            source.names["train"](0)

        return TrainLoop(model=model, optimizer=optimizer, batch=torch.rand(4, 3, 64, 64), fit=fit)

    return make


def world_rnn(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "world-models"
        source, nets = definitions(folder / "trainmdrnn.py"), imported(folder, "models.mdrnn")
        model = nets.MDRNN(4, 2, 16, 3)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9)
        names = {"mdrnn": model, "optimizer": optimizer, "LSIZE": 4, "BSIZE": 4, "SEQ_LEN": 6, "device": CPU}
        source.names.update(names, gmm_loss=nets.gmm_loss, tqdm=lambda **_s: Nothing(), f=nn.functional)
        source.names["to_latent"] = lambda *latent: latent

        def fit(batches: Any) -> None:
            loader = Loader(batches)
            loader.dataset = type("Frames", (Nothing,), {"__len__": lambda _self: 96})()
            source.names["train_loader"] = loader
            source.names["data_pass"](0, True, True)

        batch = torch.randn(4, 6, 4), torch.randn(4, 6, 2), torch.rand(4, 6), torch.zeros(4, 6), torch.randn(4, 6, 4)
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def burgers(root: Path) -> Make:
    """A physics-informed network, fitted by LBFGS; its points are the batch."""

    def make() -> TrainLoop:
        path = root / "PINNs/Burgers Equation/Burgers Inference (PyTorch).ipynb"
        source = definitions(path)
        source.names["device"] = CPU
        points = [np.random.rand(8, 2), np.random.rand(8, 1), np.random.rand(16, 2)]
        net = source.PhysicsInformedNN(*points, [2, 16, 16, 1], [0.0, 0.0], [1.0, 1.0], 0.01 / np.pi)
        net.optimizer.param_groups[0].update(max_iter=4, max_eval=8)

        def fit(batches: Any) -> None:
            for x_u, t_u, u, x_f, t_f in batches:
                net.x_u, net.t_u, net.u = x_u.requires_grad_(), t_u.requires_grad_(), u
                net.x_f, net.t_f = x_f.requires_grad_(), t_f.requires_grad_()
                net.train()

        return TrainLoop(
            model=net.dnn, optimizer=net.optimizer, batch=tuple(torch.rand(8, 1) for _ in range(5)), fit=fit
        )

    return make


def deep_surv(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "DeepSurv.pytorch"
        nets, script = imported(folder, "networks"), Source(folder / "main.py", ("",))
        config = {"drop": 0.1, "norm": True, "dims": [5, 16, 1], "activation": "ReLU", "l2_reg": 1e-3}
        model, criterion = nets.DeepSurv(config), nets.NegativeLogLikelihood(config)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        names = {"model": model, "criterion": criterion, "optimizer": optimizer, "c_index": lambda *_a: 0.5}

        def fit(batches: Any) -> None:
            model.train()
            script.block("for X, y, e in train_loader", **names, train_loader=batches)

        batch = torch.rand(12, 5), torch.rand(12, 1), (torch.rand(12, 1) < 0.6).float()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def tutorial(root: Path, place: str, loader: str = "data_loader", **settings: Any) -> Make:
    """A script of pytorch-tutorial whose loop is at its top level."""

    def make() -> TrainLoop:
        script = Source(root / f"pytorch-tutorial/tutorials/{place}/main.py", (*DATA, "total_step"), total_step=12)
        models = [v for v in script.names.values() if isinstance(v, nn.Module) and list(v.parameters())]
        optimizers = [v for v in script.names.values() if isinstance(v, torch.optim.Optimizer)]
        names = {"num_epochs": 1, "save_image": lambda *_a, **_s: None, "sample_dir": "", **settings}

        def fit(batches: Any) -> None:
            script.train(**{loader: Loader(batches)}, **names)

        return TrainLoop(model=models, optimizer=optimizers, batch=digits(), fit=fit)

    return make


def tutorial_language(root: Path) -> Make:
    def make() -> TrainLoop:
        path = root / "pytorch-tutorial/tutorials/02-intermediate/language_model/main.py"
        skip = ("hidden_size = 1024", "batch_size = 20", "seq_length = 30", "Corpus()", "corpus", "ids.size(1) // seq")
        sizes = {"hidden_size": 16, "batch_size": 4, "seq_length": 6, "vocab_size": 20, "num_batches": 1}
        script = Source(path, skip, **sizes)

        def fit(batches: Any) -> None:
            for ids in batches:
                script.train(ids=ids, num_epochs=1)

        batch = torch.randint(0, 20, (4, 13))
        return TrainLoop(model=script.model, optimizer=script.optimizer, batch=batch, fit=fit)

    return make


def captions(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "pytorch-tutorial/tutorials/03-advanced/image_captioning"
        nets, script = imported(folder, "model"), Source(folder / "train.py", ("",))

        class Encoder(nets.EncoderCNN):
            def __init__(self) -> None:
                nn.Module.__init__(self)
                self.resnet = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1))
                self.linear, self.bn = nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=0.01)

        encoder, decoder = Encoder(), nets.DecoderRNN(8, 16, 20, 1)
        parameters = [*decoder.parameters(), *encoder.linear.parameters(), *encoder.bn.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.001)
        names = {"encoder": encoder, "decoder": decoder, "optimizer": optimizer, "criterion": nn.CrossEntropyLoss()}
        names.update(
            args=SimpleNamespace(num_epochs=1, log_step=10**6, save_step=10**6), device=CPU, total_step=12, np=np
        )
        names.update(pack_padded_sequence=nn.utils.rnn.pack_padded_sequence)

        def fit(batches: Any) -> None:
            script.block("for epoch in range(args.num_epochs)", **names, data_loader=batches)

        words = torch.randint(1, 20, (4, 7))
        words[2, 6:], words[3, 4:] = 0, 0
        batch = torch.rand(4, 3, 8, 8), words, [7, 7, 6, 4]
        return TrainLoop(model={"encoder": encoder, "decoder": decoder}, optimizer=optimizer, batch=batch, fit=fit)

    return make


def morvan(root: Path, name: str) -> Make:
    """302_classification and 404_autoencoder of PyTorch-Tutorial."""

    def make() -> TrainLoop:
        path = next((root / "PyTorch-Tutorial/tutorial-contents").glob(f"{name}*"))
        plots = "import matplotlib", "from matplotlib", "mpl_toolkits", "plt.", "datasets.", "view_data", "train_data"
        script = Source(path, plots, plt=Nothing())
        net = script.names.get("net") or script.names["autoencoder"]

        def fit(batches: Any) -> None:
            if name == "404":
                script.names["a"] = [[Nothing()] * 5] * 2
                script.train(train_loader=batches, EPOCH=1, view_data=torch.rand(5, 784))
            else:
                for x, y in batches:
                    script.train(x=x, y=y, range=lambda _n: [1])

        batch = digits() if name == "404" else (torch.randn(16, 2), torch.randint(0, 2, (16,)))
        return TrainLoop(model=net, optimizer=script.optimizer, batch=batch, fit=fit)

    return make


def overlaps(root: Path, name: str, mode: str) -> Make:
    """``TrainEpoch`` of segmentation_models.pytorch with one of its losses."""

    def make() -> TrainLoop:
        folder = root / "segmentation_models.pytorch"
        package = "segmentation_models_pytorch"
        library = imported(folder, f"{package}.losses", package)
        trainer = imported(folder, f"{package}.utils.train", package).TrainEpoch
        plain = name in ("SoftCrossEntropyLoss", "SoftBCEWithLogitsLoss", "MCCLoss")
        settings: dict[str, Any] = {"smooth_factor": 0.1} if name == "SoftCrossEntropyLoss" else {}
        loss = getattr(library, name)(**settings) if plain else getattr(library, name)(mode)
        loss.__name__ = name
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3 if mode == "multiclass" else 1, 1)
        )
        if name == "MCCLoss":
            model.append(nn.Sigmoid())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        epoch = trainer(model, loss, [], optimizer, verbose=False)
        shape, high = ((4, 8, 8), 3) if mode == "multiclass" else ((4, 1, 8, 8), 2)
        mask = torch.randint(0, high, shape)
        batch = torch.rand(4, 3, 8, 8), mask if mode == "multiclass" else mask.float()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=epoch.run)

    return make


def loops(root: Path) -> dict[str, Make]:
    middle, last = "02-intermediate", "03-advanced"
    losses = [("DiceLoss", "multiclass"), ("JaccardLoss", "binary"), ("FocalLoss", "multiclass")]
    losses += [("TverskyLoss", "binary"), ("LovaszLoss", "multiclass"), ("SoftCrossEntropyLoss", "multiclass")]
    losses += [("SoftBCEWithLogitsLoss", "binary"), ("MCCLoss", "binary")]
    return {
        **{name: forecaster(root, name) for name in ("Informer2020", "Autoformer", "PatchTST")},
        "n-beats": n_beats(root),
        "TCN adding_problem": adding(root),
        "glow-pytorch": glow(root),
        "real-nvp": real_nvp(root),
        **{f"normalizing_flows {name}": maf(root, name) for name in ("MAF", "RealNVP", "MADEMOG")},
        "nerf-pytorch": nerf(root),
        "MAML-Pytorch": maml(root),
        "world-models vae": world_vae(root),
        "world-models mdrnn": world_rnn(root),
        "PINNs Burgers": burgers(root),
        "DeepSurv.pytorch": deep_surv(root),
        "pytorch-tutorial recurrent": tutorial(root, f"{middle}/recurrent_neural_network", "train_loader"),
        "pytorch-tutorial vae": tutorial(root, f"{last}/variational_autoencoder"),
        "pytorch-tutorial gan": tutorial(root, f"{last}/generative_adversarial_network", batch_size=8),
        "pytorch-tutorial language_model": tutorial_language(root),
        "pytorch-tutorial image_captioning": captions(root),
        "PyTorch-Tutorial 302": morvan(root, "302"),
        "PyTorch-Tutorial 404": morvan(root, "404"),
        **{f"segmentation_models {name}": overlaps(root, name, mode) for name, mode in losses},
    }
