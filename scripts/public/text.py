"""Language, recommendation, graphs and speech."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import torch
from torch import nn

from pytest_trainloop import TrainLoop
from scripts.public.images import CPU
from scripts.public.source import Loader, Nothing, Source, definitions, imported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[], TrainLoop]


def sentences(length: int = 7, rows: int = 4, vocabulary: int = 20, pad: int = 1) -> torch.Tensor:
    """Token ids, time first, of sentences that begin with 2, end with 3 and are padded with 1."""
    ids = torch.randint(4, vocabulary, (length, rows))
    ids[0] = 2
    for row in range(rows):
        end = length - row % 3
        ids[end - 1, row] = 3
        ids[end:, row] = pad
    return ids


def min_gpt(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "minGPT"
        script, gpt = imported(folder, "mingpt.trainer"), imported(folder, "mingpt.model").GPT
        config = gpt.get_default_config()
        config.model_type, config.n_layer, config.n_head, config.n_embd = None, 1, 2, 16
        config.vocab_size, config.block_size = 20, 8
        settings = script.Trainer.get_default_config()
        settings.device = "cpu"
        trainer = script.Trainer(settings, gpt(config), range(96))

        def fit(batches: Any) -> None:
            rounds = list(batches)
            settings.max_iters = len(rounds)
            script.DataLoader = lambda *_a, **_s: rounds
            trainer.run()

        batch = torch.randint(0, 20, (4, 8)), torch.randint(0, 20, (4, 8))
        return TrainLoop(model=trainer.model, batch=batch, fit=fit)

    return make


def makemore(root: Path, kind: str) -> Make:
    def make() -> TrainLoop:
        source = definitions(root / "makemore/makemore.py")
        config = source.ModelConfig(block_size=6, vocab_size=12, n_layer=1, n_embd=16, n_embd2=16, n_head=2)
        model = {"transformer": source.Transformer, "mlp": source.MLP, "bow": source.BoW}.get(kind, source.RNN)(
            config, **({"cell_type": kind} if kind in ("rnn", "gru") else {})
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
        script = Source(root / "makemore/makemore.py", ("",))
        args = SimpleNamespace(device="cpu")

        def fit(batches: Any) -> None:
            rounds = list(batches)
            args.max_steps, stream = len(rounds), iter(rounds)
            loader = SimpleNamespace(next=lambda: next(stream))
            names = {**source.names, "args": args, "batch_loader": loader, "model": model, "optimizer": optimizer}
            if rounds:
                script.block("while True:\n\n        t0", **names, best_loss=None, step=0)

        x, y = torch.randint(1, 12, (6, 6)), torch.randint(0, 12, (6, 6))
        y[1, 4:] = y[2, 3:] = -1
        x[1, 5:] = x[2, 4:] = 0
        return TrainLoop(model=model, optimizer=optimizer, batch=(x, y), fit=fit)

    return make


def translation(root: Path, number: int) -> Make:
    """The notebooks of pytorch-seq2seq."""

    def make() -> TrainLoop:
        path = next((root / "pytorch-seq2seq").glob(f"{number} - *.ipynb"))
        source = _notebook(path)
        if number == 1:
            parts = source.Encoder(20, 8, 16, 2, 0.1), source.Decoder(20, 8, 16, 2, 0.1)
        elif number == 2:
            parts = source.Encoder(20, 8, 16, 0.1), source.Decoder(20, 8, 16, 0.1)
        else:
            attention = source.Attention(16, 16)
            parts = source.Encoder(20, 8, 16, 16, 0.1), source.Decoder(20, 8, 16, 16, 0.1, attention)
        model = source.Seq2Seq(*parts, CPU)
        model.apply(source.init_weights)
        optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(ignore_index=1)

        def fit(batches: Any) -> None:
            source.train_fn(model, Loader(batches), optimizer, criterion, 1.0, 0.5, CPU)

        batch = {"de_ids": sentences(), "en_ids": sentences(6)}
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, batch_dim=1)

    return make


def _notebook(path: Path) -> Any:
    source = definitions(path)
    source.names["tqdm"] = SimpleNamespace(tqdm=lambda rounds, **_s: rounds)
    return source


def sentiment(root: Path, number: int) -> Make:
    """The notebooks of pytorch-sentiment-analysis."""

    def make() -> TrainLoop:
        source = _notebook(next((root / "pytorch-sentiment-analysis").glob(f"{number} - *.ipynb")))
        model = source.NBoW(20, 8, 2, 1) if number == 1 else source.CNN(20, 8, 6, [2, 3], 2, 0.25, 1)
        optimizer, criterion = torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()

        def fit(batches: Any) -> None:
            source.train(Loader(batches), model, criterion, optimizer, CPU)

        batch = {"ids": sentences().t().contiguous(), "label": torch.randint(0, 2, (4,))}
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def attention(root: Path, smoothing: bool) -> Make:
    """attention-is-all-you-need-pytorch."""

    def make() -> TrainLoop:
        folder = root / "attention-is-all-you-need-pytorch"
        script = imported(folder, "train")
        sizes = {"d_word_vec": 16, "d_model": 16, "d_inner": 16, "n_layers": 1, "n_head": 2, "d_k": 8, "d_v": 8}
        model = script.Transformer(20, 20, src_pad_idx=1, trg_pad_idx=1, n_position=20, **sizes)
        inner = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-09)
        optimizer = script.ScheduledOptim(inner, 2.0, 16, 4000)
        options = SimpleNamespace(src_pad_idx=1, trg_pad_idx=1)
        script.tqdm = lambda rounds, **_s: rounds

        def fit(batches: Any) -> None:
            rounds = (SimpleNamespace(src=src, trg=trg) for src, trg in batches)
            script.train_epoch(model, rounds, optimizer, options, CPU, smoothing)

        batch = sentences(), sentences(6)
        return TrainLoop(model=model, optimizer=inner, batch=batch, fit=fit, batch_dim=1)

    return make


def awd_lstm(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "awd-lstm-lm"
        source = definitions(folder / "main.py")
        model = imported(folder, "model").RNNModel("LSTM", 20, 16, 16, 2, 0.1, 0.1, 0.1, 0.0, 0.0, True)
        criterion = imported(folder, "splitcross").SplitCrossEntropyLoss(16, splits=[], verbose=False)
        parameters = [*model.parameters(), *criterion.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=1.0, weight_decay=1.2e-6)
        args = SimpleNamespace(model="LSTM", batch_size=4, bptt=8, alpha=2, beta=1, clip=0.25, log_interval=10**6)
        source.names.update(model=model, criterion=criterion, optimizer=optimizer, args=args, params=parameters)
        source.names["corpus"] = SimpleNamespace(dictionary=range(20))

        def fit(batches: Any) -> None:
            for ids in batches:
                source.names["train_data"] = ids
                source.names["train"]()

        batch = torch.randint(0, 20, (9, 4))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit, batch_dim=1)

    return make


def bert(root: Path) -> Make:
    def make() -> TrainLoop:
        folder = root / "BERT-pytorch"
        script = imported(folder, "bert_pytorch.trainer.pretrain")
        net = script.BERT(20, hidden=16, n_layers=1, attn_heads=2)

        class Progress(list):
            write = staticmethod(lambda _text: None)

        script.tqdm = SimpleNamespace(tqdm=lambda rounds, **_s: Progress(rounds))
        trainer = script.BERTTrainer(net, 20, None, with_cuda=False, warmup_steps=100)
        ids = torch.randint(5, 20, (4, 8))
        labels, chosen = torch.zeros(4, 8).long(), torch.rand(4, 8) < 0.3
        chosen[:, 1] = True
        labels[chosen] = ids[chosen]
        ids[chosen] = 4
        ids[1, 6:] = labels[1, 6:] = 0
        segments = (torch.arange(8) >= 4).long().add(1).repeat(4, 1)
        segments[1, 6:] = 0
        batch = {
            "bert_input": ids,
            "bert_label": labels,
            "segment_label": segments,
            "is_next": torch.tensor([0, 1, 1, 0]),
        }

        def fit(batches: Any) -> None:
            trainer.train_data = Loader(batches)
            trainer.train(0)

        return TrainLoop(model=trainer.model, optimizer=trainer.optim, batch=batch, fit=fit)

    return make


def crf(root: Path) -> Make:
    """The layer of pytorch-crf behind an encoder, as its documentation trains it."""

    def make() -> TrainLoop:
        layer = imported(root / "pytorch-crf", "torchcrf").CRF(5, batch_first=True)
        encoder = nn.Sequential(nn.Embedding(20, 16, padding_idx=1), nn.Linear(16, 5))
        models = nn.ModuleDict({"encoder": encoder, "crf": layer})
        optimizer = torch.optim.Adam(models.parameters(), lr=1e-2)

        def fit(batches: Any) -> None:
            for ids, tags, mask in batches:
                optimizer.zero_grad()
                loss = -layer(encoder(ids), tags, mask, reduction="token_mean")
                loss.backward()
                optimizer.step()

        ids = sentences().t().contiguous()
        return TrainLoop(model=models, optimizer=optimizer, batch=(ids, torch.randint(0, 5, (4, 7)), ids != 1), fit=fit)

    return make


def filtering(root: Path, name: str) -> Make:
    """neural-collaborative-filtering."""

    def make() -> TrainLoop:
        script = imported(root / "neural-collaborative-filtering/src", name.lower())
        config = {"alias": "", "num_users": 10, "num_items": 12, "latent_dim": 8, "use_cuda": False, "adam_lr": 1e-3}
        config.update(optimizer="adam", l2_regularization=0, layers=[16, 8], pretrain=False)
        config.update(latent_dim_mf=8, latent_dim_mlp=8)
        imported(root / "neural-collaborative-filtering/src", "engine").SummaryWriter = lambda **_s: Nothing()
        vars(script)["Engine"].__init__.__globals__["SummaryWriter"] = lambda **_s: Nothing()
        engine = getattr(script, f"{name}Engine")(config)
        batch = torch.randint(0, 10, (8,)), torch.randint(0, 12, (8,)), torch.randint(0, 2, (8,))
        return TrainLoop(
            model=engine.model, optimizer=engine.opt, batch=batch, fit=lambda b: engine.train_an_epoch(Loader(b), 0)
        )

    return make


def deep_fm(root: Path) -> Make:
    def make() -> TrainLoop:
        source = imported(root / "DeepFM_with_PyTorch", "model.DeepFM")
        model = source.DeepFM([6, 5, 4], use_cuda=False, hidden_dims=[8, 8])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=0.0)

        def fit(batches: Any) -> None:
            model.fit(Loader(batches), None, optimizer, epochs=1)

        ids = torch.stack([torch.randint(0, n, (8,)) for n in (6, 5, 4)], 1)[..., None]
        batch = ids, torch.rand(8, 3), torch.randint(0, 2, (8,)).float()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def attention_graph(root: Path) -> Make:
    """gat of pytorch/examples: one graph is the batch."""

    def make() -> TrainLoop:
        source = definitions(root / "examples/gat/main.py")
        model = source.GAT(in_features=8, n_hidden=8, n_heads=2, num_classes=3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
        links = ((torch.rand(12, 12) < 0.3).float() + torch.eye(12)).clamp(max=1)

        def fit(batches: Any) -> None:
            for epoch, (x, adjacency, y) in enumerate(batches):
                seen = torch.arange(len(y)) < 8
                source.train_iter(epoch, model, optimizer, nn.NLLLoss(), (x, adjacency), y, seen, ~seen, 1000)

        batch = torch.rand(12, 8), links, torch.randint(0, 3, (12,))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def citations(root: Path, name: str) -> Make:
    """pygcn and pyGAT: their train functions over names of the script; pygcn's adjacency is sparse."""

    def make() -> TrainLoop:
        folder = root / name
        nets = imported(folder, "pygcn.models" if name == "pygcn" else "models")
        tools = imported(folder, "pygcn.utils" if name == "pygcn" else "utils")
        source = definitions(folder / ("pygcn/train.py" if name == "pygcn" else "train.py"))
        settings = {"nfeat": 8, "nhid": 8, "nclass": 3, "dropout": 0.5}
        if name == "pygcn":
            model = nets.GCN(**settings)
        else:
            model = getattr(nets, "SpGAT" if name.endswith("sparse") else "GAT")(**settings, nheads=2, alpha=0.2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        source.names.update(model=model, optimizer=optimizer, args=SimpleNamespace(fastmode=False))
        source.names["accuracy"] = tools.accuracy

        def fit(batches: Any) -> None:
            for epoch, (features, adjacency, labels) in enumerate(batches):
                adj = adjacency.to_sparse() if name == "pygcn" else adjacency
                seen, rest = torch.arange(8), torch.arange(8, len(labels))
                source.names.update(features=features, adj=adj, labels=labels, idx_train=seen, idx_val=rest)
                source.names["train"](epoch)

        links = ((torch.rand(12, 12) < 0.3).float() + torch.eye(12)).clamp(max=1)
        batch = torch.rand(12, 8), links / links.sum(1, keepdim=True), torch.randint(0, 3, (12,))
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def speech(root: Path) -> Make:
    """The layers and ``training_step`` of deepspeech.pytorch, a Lightning module, in a plain loop."""

    def make() -> TrainLoop:
        configs = "deepspeech_pytorch.configs.train_config"  # its dataclasses are refused by a Python of today
        sys.modules.setdefault(configs, MagicMock())
        source = imported(root / "deepspeech.pytorch", "deepspeech_pytorch.model")

        class Acoustic(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                convolution = nn.Conv2d(1, 4, kernel_size=(5, 5), stride=(2, 2), padding=(2, 2))
                self.conv = source.MaskConv(
                    nn.Sequential(convolution, nn.BatchNorm2d(4), nn.Hardtanh(0, 20, inplace=True))
                )
                self.rnns = nn.Sequential(
                    source.BatchRNN(16, 16, bidirectional=True, batch_norm=False),
                    source.BatchRNN(16, 16, bidirectional=True),
                )
                fully_connected = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 6, bias=False))
                self.fc = nn.Sequential(source.SequenceWise(fully_connected))
                self.inference_softmax, self.bidirectional = source.InferenceBatchSoftmax(), True
                self.criterion = nn.CTCLoss(blank=0, reduction="sum", zero_infinity=True)

            forward, get_seq_lens = source.DeepSpeech.forward, source.DeepSpeech.get_seq_lens
            training_step = source.DeepSpeech.training_step

        model = Acoustic()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, weight_decay=1e-5)

        def fit(batches: Any) -> None:
            model.train()
            for number, (sound, targets, share, sizes) in enumerate(batches):
                optimizer.zero_grad()
                loss = model.training_step((sound, targets.flatten(), share.clone(), sizes), number)
                loss.backward()
                optimizer.step()

        sound, share = torch.randn(4, 1, 8, 24), torch.tensor([1.0, 1.0, 0.75, 0.5])
        sound[2, ..., 18:], sound[3, ..., 12:] = 0, 0
        batch = sound, torch.randint(1, 6, (4, 3)), share, torch.full((4,), 3).int()
        return TrainLoop(model=model, optimizer=optimizer, batch=batch, fit=fit)

    return make


def loops(root: Path) -> dict[str, Make]:
    return {
        "minGPT": min_gpt(root),
        "makemore transformer": makemore(root, "transformer"),
        "makemore mlp": makemore(root, "mlp"),
        "makemore gru": makemore(root, "gru"),
        "makemore bow": makemore(root, "bow"),
        **{f"pytorch-seq2seq {n}": translation(root, n) for n in (1, 2, 3)},
        **{f"pytorch-sentiment-analysis {n}": sentiment(root, n) for n in (1, 3)},
        "attention-is-all-you-need": attention(root, False),
        "attention-is-all-you-need smoothing": attention(root, True),
        "awd-lstm-lm": awd_lstm(root),
        "BERT-pytorch": bert(root),
        "pytorch-crf": crf(root),
        "neural-collaborative-filtering GMF": filtering(root, "GMF"),
        "neural-collaborative-filtering MLP": filtering(root, "MLP"),
        "DeepFM_with_PyTorch": deep_fm(root),
        "pytorch/examples gat": attention_graph(root),
        "pygcn": citations(root, "pygcn"),
        "pyGAT": citations(root, "pyGAT"),
        "deepspeech.pytorch": speech(root),
    }
