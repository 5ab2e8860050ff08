"""Speech and sound: recognition, vocoders."""

# ruff: noqa: N801, N805
from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from pytest_trainloop import TrainLoop
from tests.blind.refactors.cases import keeps

MELS, TOKENS = 8, 9


def utterances(n, rows=4, frames=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(n):
        lengths = torch.randint(10, frames + 1, (rows,), generator=generator)
        lengths[0] = frames
        speech = torch.randn(rows, frames, MELS, generator=generator)
        speech = speech * (torch.arange(frames)[None, :, None] < lengths[:, None, None])
        batches.append(
            {
                "speech": speech,
                "speech_lengths": lengths,
                "text": torch.randint(1, TOKENS, (rows, 4), generator=generator),
                "text_lengths": torch.randint(2, 5, (rows,), generator=generator),
            }
        )
    return batches


def waves(n, rows=4, samples=128, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, samples, generator=generator) for _ in range(n)]


@keeps(
    "audio",
    "the normalised weights of the convolutions are kept by torch's newer function",
    thread="huggingface/transformers#25946",
    renamed={
        f"{name}.weight_{old}": f"{name}.parametrizations.weight.original{new}"
        for name in ("pre", "post")
        for old, new in (("g", 0), ("v", 1))
    },
)
class normed_weights:
    class Vocoder(nn.Module):
        def __init__(self, weight_norm):
            super().__init__()
            self.pre = weight_norm(nn.Conv1d(1, 12, 7, padding=3))
            self.post = weight_norm(nn.Conv1d(12, 1, 7, padding=3))

        def forward(self, x):
            return torch.tanh(self.post(F.leaky_relu(self.pre(x), 0.1)))

    def _loop(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.8, 0.99))

        def fit(batches):
            for wave in batches:
                x = wave.unsqueeze(1)
                optimizer.zero_grad()
                F.l1_loss(model(x), x.tanh()).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=waves, fit=fit)

    def before():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return normed_weights._loop(normed_weights.Vocoder(nn.utils.weight_norm))

    def after():
        return normed_weights._loop(normed_weights.Vocoder(nn.utils.parametrizations.weight_norm))


@keeps(
    "audio",
    "the criterion of a recogniser becomes a module, and the subsampling a part of its own",
    thread="espnet/espnet#745",
    renamed={"conv1": "subsample.conv1", "conv2": "subsample.conv2", "ctc": "ctc.projection"},
)
class recogniser:
    def before():
        class ASR(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv1 = nn.Conv1d(MELS, 16, 3, stride=2, padding=1)
                self.conv2 = nn.Conv1d(16, 16, 3, padding=1)
                self.rnn = nn.GRU(16, 12, batch_first=True, bidirectional=True)
                self.ctc = nn.Linear(24, TOKENS)

            def forward(self, speech, speech_lengths):
                x = F.relu(self.conv1(speech.transpose(1, 2)))
                x = F.relu(self.conv2(x)).transpose(1, 2)
                return self.ctc(self.rnn(x)[0]), (speech_lengths + 1) // 2

        model = ASR()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

        def fit(batches):
            for b in batches:
                logits, lengths = model(b["speech"], b["speech_lengths"])
                loss = F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), b["text"], lengths, b["text_lengths"])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=utterances, fit=fit)

    def after():
        class Encoded(NamedTuple):
            hidden: torch.Tensor
            lengths: torch.Tensor

        class Subsampling(nn.Module):
            def __init__(self, features, width):
                super().__init__()
                self.conv1 = nn.Conv1d(features, width, 3, stride=2, padding=1)
                self.conv2 = nn.Conv1d(width, width, 3, padding=1)

            def forward(self, x, lengths):
                x = self.conv2(self.conv1(x.mT).relu()).relu()
                return Encoded(x.mT, torch.div(lengths + 1, 2, rounding_mode="floor"))

        class CTC(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.projection = nn.Linear(width, TOKENS)
                self.criterion = nn.CTCLoss(blank=0, reduction="mean", zero_infinity=False)

            def forward(self, encoded, text, text_lengths):
                logp = F.log_softmax(self.projection(encoded.hidden), dim=-1)
                return self.criterion(logp.permute(1, 0, 2), text, encoded.lengths, text_lengths)

        class ASRModel(nn.Module):
            def __init__(self):
                super().__init__()
                self.subsample = Subsampling(MELS, 16)
                self.rnn = nn.GRU(16, 12, batch_first=True, bidirectional=True)
                self.ctc = CTC(24)

            def forward(self, speech, speech_lengths, text, text_lengths):
                x, lengths = self.subsample(speech, speech_lengths)
                return self.ctc(Encoded(self.rnn(x)[0], lengths), text, text_lengths)

        class Runner:
            def __init__(self, model, max_norm=5.0):
                self.model, self.max_norm = model, max_norm
                self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

            def run(self, batches):
                for batch in batches:
                    loss = self.model(**batch)
                    loss.backward()
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()

        runner = Runner(ASRModel())
        return TrainLoop(model=runner.model, optimizer=runner.optimizer, batches=utterances, fit=runner.run)


def triangles(bins=17, filters=MELS):
    centres = torch.linspace(0, bins - 1, filters + 2, dtype=torch.float32)
    x = torch.arange(bins, dtype=torch.float32)[:, None]
    up = (x - centres[:-2]) / (centres[1:-1] - centres[:-2])
    down = (centres[2:] - x) / (centres[2:] - centres[1:-1])
    return torch.minimum(up, down).clamp(min=0)


@keeps(
    "audio",
    "the filters of the front end are a buffer of a module in place of a constant of the script",
    thread="AppleHolic/pytorch_sound#28",
    renamed={"0": "encoder.0", "2": "encoder.2"},
)
class front_end:
    def before():
        filters = triangles()
        model = nn.Sequential(nn.Linear(MELS, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for wave in batches:
                frames = wave.unfold(1, 32, 16)
                spectrum = torch.fft.rfft(frames).abs().pow(2)
                mel = torch.log(torch.matmul(spectrum, filters.to(wave)) + 1e-6)
                logits = model(mel).mean(1)
                target = (wave.mean(1) > 0).long()
                optimizer.zero_grad()
                F.cross_entropy(logits, target).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=waves, fit=fit)

    def after():
        class LogMel(nn.Module):
            def __init__(self, size=32, hop=16, log_floor=1e-6):
                super().__init__()
                self.size, self.hop, self.log_floor = size, hop, log_floor
                self.register_buffer("filters", triangles(size // 2 + 1), persistent=False)

            @torch.no_grad()
            def forward(self, wave):
                spectrum = torch.fft.rfft(wave.unfold(-1, self.size, self.hop))
                power = spectrum.real.square() + spectrum.imag.square()
                return (torch.einsum("btf,fm->btm", power, self.filters) + self.log_floor).log()

        class Classifier(nn.Module):
            def __init__(self):
                super().__init__()
                self.front = LogMel()
                self.encoder = nn.Sequential(nn.Linear(MELS, 16), nn.ReLU(), nn.Linear(16, 2))

            def forward(self, wave):
                return self.encoder(self.front(wave)).mean(dim=1)

        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def fit(batches):
            for wave in batches:
                loss = F.cross_entropy(model(wave), (wave.mean(1) > 0).long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=waves, fit=fit)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(1, 6, 5, 2, 2), nn.Conv1d(6, 8, 5, 2, 2), nn.Conv1d(8, 1, 3, 1, 1)])

    def forward(self, x):
        features = []
        for layer in self.layers[:-1]:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return self.layers[-1](x), features


@keeps(
    "audio",
    "the two steps of an adversarial vocoder are pulled out of the loop into methods",
    thread="kan-bayashi/ParallelWaveGAN#278",
)
class adversarial_steps:
    def _parts():
        generator = nn.Sequential(nn.Conv1d(4, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv1d(12, 1, 3, padding=1))
        discriminator = Discriminator()
        opt_g = torch.optim.AdamW(generator.parameters(), lr=2e-3, betas=(0.8, 0.99))
        opt_d = torch.optim.AdamW(discriminator.parameters(), lr=1e-3, betas=(0.8, 0.99))
        return generator, discriminator, opt_g, opt_d

    def _loop(fit, generator, discriminator, opt_g, opt_d):
        return TrainLoop(
            model={"generator": generator, "discriminator": discriminator},
            optimizer=[opt_g, opt_d],
            batches=waves,
            fit=fit,
        )

    def _condition(wave):
        return wave.unflatten(1, (-1, 4)).transpose(1, 2).repeat_interleave(4, dim=-1)

    def before():
        generator, discriminator, opt_g, opt_d = adversarial_steps._parts()

        def fit(batches):
            for wave in batches:
                y = wave.unsqueeze(1)
                y_hat = generator(adversarial_steps._condition(wave))
                opt_d.zero_grad()
                real, _ = discriminator(y)
                fake, _ = discriminator(y_hat.detach())
                loss_d = ((1 - real) ** 2).mean() + (fake**2).mean()
                loss_d.backward()
                opt_d.step()
                opt_g.zero_grad()
                _, real_features = discriminator(y)
                fake, fake_features = discriminator(y_hat)
                loss_g = ((1 - fake) ** 2).mean() + 45 * F.l1_loss(y_hat, y)
                for r, f in zip(real_features, fake_features, strict=True):
                    loss_g = loss_g + 2 * (r.detach() - f).abs().mean()
                loss_g.backward()
                opt_g.step()

        return adversarial_steps._loop(fit, generator, discriminator, opt_g, opt_d)

    def after():
        class GANTrainer:
            lambda_mel, lambda_features = 45.0, 2.0

            def __init__(self):
                self.generator, self.discriminator, self.opt_g, self.opt_d = adversarial_steps._parts()

            def discriminator_step(self, y, y_hat):
                real, _ = self.discriminator(y)
                fake, _ = self.discriminator(y_hat.detach())
                loss = F.mse_loss(real, torch.ones_like(real)) + F.mse_loss(fake, torch.zeros_like(fake))
                self.opt_d.zero_grad()
                loss.backward()
                self.opt_d.step()
                return loss.item()

            def generator_step(self, y, y_hat):
                with torch.no_grad():
                    _, targets = self.discriminator(y)
                self.discriminator.requires_grad_(False)
                fake, features = self.discriminator(y_hat)
                terms = {
                    "adversarial": F.mse_loss(fake, torch.ones_like(fake)),
                    "mel": self.lambda_mel * F.l1_loss(y_hat, y),
                    "features": self.lambda_features
                    * sum(F.l1_loss(f, t) for f, t in zip(features, targets, strict=True)),
                }
                loss = sum(terms.values())
                self.opt_g.zero_grad()
                loss.backward()
                self.opt_g.step()
                self.discriminator.requires_grad_(True)
                return {name: term.item() for name, term in terms.items()}

            def fit(self, batches):
                for wave in batches:
                    y = wave.unsqueeze(1)
                    y_hat = self.generator(adversarial_steps._condition(wave))
                    self.discriminator_step(y, y_hat)
                    self.generator_step(y, y_hat)

        trainer = GANTrainer()
        return adversarial_steps._loop(
            trainer.fit, trainer.generator, trainer.discriminator, trainer.opt_g, trainer.opt_d
        )


@keeps(
    "audio",
    "the loss over valid frames is a mean over what is selected in place of a masked sum over its count",
    thread="Mddct/transformer-vocos#41",
)
class valid_frames:
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(MELS, 16, batch_first=True)
            self.out = nn.Linear(16, MELS)

        def forward(self, x):
            return self.out(self.rnn(x)[0])

    def _loop(loss_fn):
        model = valid_frames.Denoiser()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, amsgrad=True)

        def fit(batches):
            for batch in batches:
                x, lengths = batch["speech"], batch["speech_lengths"]
                mask = torch.arange(x.size(1))[None] < lengths[:, None]
                optimizer.zero_grad()
                loss_fn(model(x + 0.1 * torch.randn_like(x)), x, mask).backward()
                optimizer.step()

        return TrainLoop(model=model, optimizer=optimizer, batches=utterances, fit=fit)

    def before():
        def loss_fn(prediction, target, mask):
            error = F.l1_loss(prediction, target, reduction="none").sum(-1)
            return (error * mask).sum() / mask.sum() / target.size(-1)

        return valid_frames._loop(loss_fn)

    def after():
        def loss_fn(prediction, target, mask):
            return F.l1_loss(prediction[mask], target[mask])

        return valid_frames._loop(loss_fn)
