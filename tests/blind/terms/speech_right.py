"""Speech in small that is right, and looks odd."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import right

VOCAB = 8


def utterances(n=24, max_len=4, per_char=4, dim=12, seed=0):
    """Characters are 1..VOCAB - 1, and 0 is padding of the texts."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randn(VOCAB, dim, generator=g)
    items = []
    for _ in range(n):
        k = int(torch.randint(2, max_len + 1, (1,), generator=g))
        chars = torch.randint(1, VOCAB, (k,), generator=g)
        feats = codes[chars].repeat_interleave(per_char, 0)
        items.append((feats + 0.1 * torch.randn(feats.shape, generator=g), chars))
    return items


def pad(seqs, value=0):
    return nn.utils.rnn.pad_sequence(seqs, batch_first=True, padding_value=value)


class Acoustic(nn.Module):
    def __init__(self, dim=12, vocab=VOCAB, hidden=24):
        super().__init__()
        self.conv = nn.Conv1d(dim, hidden, 3, padding=1)
        self.lin = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, feats):
        h = F.relu(self.conv(feats.transpose(1, 2))).transpose(1, 2)
        return self.out(F.relu(self.lin(h)))


@right(
    "speech",
    "the blank is the last class, and labels are shifted to start at 0; frames behind the lengths are not aligned",
    thread="tensorflow/community#295",
)
def ctc_last_blank():
    model = Acoustic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def collate(items):
        feats, chars = zip(*items, strict=True)
        return {
            "feats": pad(feats),
            "feat_lens": torch.tensor([len(f) for f in feats]),
            "text": pad(chars),
            "text_lens": torch.tensor([len(c) for c in chars]),
        }

    loader = DataLoader(utterances(), batch_size=6, collate_fn=collate)

    def fit(batches):
        for b in batches:
            log_probs = model(b["feats"]).float().log_softmax(2)
            loss = F.ctc_loss(
                log_probs.permute(1, 0, 2),
                (b["text"] - 1).clamp(min=0),
                b["feat_lens"],
                b["text_lens"],
                blank=VOCAB - 1,
                zero_infinity=True,
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=fit,
        padding=[Padding(pad_id=0, dim=1, of=("feats",)), Padding(pad_id=0, dim=1, of=("text",))],
    )


@right(
    "speech",
    "the loss is the negative SI-SDR in dB, so it falls below 0, and each row has its own best permutation",
    thread="asteroid-team/asteroid, PITLossWrapper(pairwise_neg_sisdr)",
)
def pit_sisdr():
    model = Separator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*mixtures(seed=1)), batch_size=6, shuffle=True)

    def pairwise_neg_sisdr(est, ref, eps=1e-8):
        est = est - est.mean(-1, keepdim=True)
        ref = ref - ref.mean(-1, keepdim=True)
        s_est, s_ref = est[:, :, None], ref[:, None]
        dot = (s_est * s_ref).sum(-1, keepdim=True)
        proj = dot * s_ref / (s_ref.square().sum(-1, keepdim=True) + eps)
        noise = s_est - proj
        ratio = proj.square().sum(-1) / (noise.square().sum(-1) + eps)
        return -10 * torch.log10(ratio + eps)

    def pit(pw):
        perms = list(itertools.permutations(range(pw.shape[1])))
        totals = torch.stack([torch.stack([pw[:, i, j] for i, j in enumerate(p)]).mean(0) for p in perms], 1)
        return totals.min(dim=1).values.mean()

    def fit(batches):
        for mix, sources in batches:
            loss = pit(pairwise_neg_sisdr(model(mix), sources))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


def mixtures(n=24, length=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length)
    f = torch.stack([0.02 + 0.05 * torch.rand(n, generator=g), 0.2 + 0.2 * torch.rand(n, generator=g)], 1)
    sources = torch.sin(2 * torch.pi * f[..., None] * t + 6.28 * torch.rand(n, 2, 1, generator=g))
    flip = torch.rand(n, generator=g) < 0.5
    sources[flip] = sources[flip].flip(1)
    return sources.sum(1), sources


class Separator(nn.Module):
    def __init__(self, sources=2, width=16):
        super().__init__()
        self.enc = nn.Conv1d(1, width, 16, stride=4, padding=6)
        self.mid = nn.Conv1d(width, width, 3, padding=1)
        self.mask = nn.Conv1d(width, width * sources, 1)
        self.dec = nn.ConvTranspose1d(width, 1, 16, stride=4, padding=6)
        self.sources = sources

    def forward(self, mix):
        w = self.enc(mix[:, None])
        m = self.mask(F.relu(self.mid(F.relu(w)))).view(len(mix), self.sources, -1, w.shape[-1]).sigmoid()
        return self.dec((w[:, None] * m).flatten(0, 1)).view(len(mix), self.sources, -1)


def tones(n=24, length=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    f = 0.02 + 0.2 * torch.rand(n, 2, generator=g)
    a = 0.3 + 0.5 * torch.rand(n, 2, generator=g)
    wave = (a[..., None] * torch.sin(2 * torch.pi * f[..., None] * torch.arange(length))).sum(1)
    return torch.cat([f * 4, a], -1), wave


class Synth(nn.Module):
    def __init__(self, length=256, hidden=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, length)

    def forward(self, x):
        return self.out(self.net(x))


class ScaleDiscriminator(nn.Module):
    def __init__(self, pool=1):
        super().__init__()
        self.pool = nn.AvgPool1d(pool) if pool > 1 else nn.Identity()
        self.convs = nn.ModuleList([nn.Conv1d(1, 8, 9, stride=4, padding=4), nn.Conv1d(8, 8, 9, stride=4, padding=4)])
        self.post = nn.Conv1d(8, 1, 3, padding=1)

    def forward(self, x):
        x, feats = self.pool(x[:, None]), []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            feats.append(x)
        return self.post(x).flatten(1), feats


class MSD(nn.Module):
    def __init__(self):
        super().__init__()
        self.discriminators = nn.ModuleList([ScaleDiscriminator(1), ScaleDiscriminator(2)])

    def forward(self, y, y_hat):
        outs = [(*d(y), *d(y_hat)) for d in self.discriminators]
        return [list(o) for o in (zip(*((r, g, fr, fg) for r, fr, g, fg in outs), strict=True))]


def log_mel(wave, n_fft=64, mels=12):
    spec = torch.stft(wave, n_fft, n_fft // 4, window=torch.hann_window(n_fft), return_complex=True).abs()
    edges = torch.linspace(0, 1, mels + 2) ** 1.5 * (n_fft // 2)
    k = torch.arange(n_fft // 2 + 1)
    up = (k - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - k) / (edges[2:] - edges[1:-1])[:, None]
    bank = torch.minimum(up, down).clamp(min=0)
    return torch.log(torch.clamp(bank @ spec, min=1e-5))


@right(
    "speech",
    "the generator's losses leave gradients in the discriminator, which are cleared before its step; mel counts 45",
    thread="jik876/hifi-gan, train.py",
)
def hifigan():
    generator, msd = Synth(), MSD()
    optim_g = torch.optim.AdamW(generator.parameters(), 1e-3, betas=(0.8, 0.99))
    optim_d = torch.optim.AdamW(msd.parameters(), 1e-3, betas=(0.8, 0.99))
    loader = DataLoader(TensorDataset(*tones(seed=2)), batch_size=6)

    def discriminator_loss(disc_real_outputs, disc_generated_outputs):
        loss = 0
        for dr, dg in zip(disc_real_outputs, disc_generated_outputs, strict=True):
            loss = loss + torch.mean((1 - dr) ** 2) + torch.mean(dg**2)
        return loss

    def feature_loss(fmap_r, fmap_g):
        loss = 0
        for dr, dg in zip(fmap_r, fmap_g, strict=True):
            for rl, gl in zip(dr, dg, strict=True):
                loss = loss + torch.mean(torch.abs(rl - gl))
        return loss * 2

    def generator_loss(disc_outputs):
        return sum(torch.mean((1 - dg) ** 2) for dg in disc_outputs)

    def train(batches):
        for x, y in batches:
            y_g_hat = generator(x)
            optim_d.zero_grad()
            real, fake, _, _ = msd(y, y_g_hat.detach())
            discriminator_loss(real, fake).backward()
            optim_d.step()

            optim_g.zero_grad()
            loss_mel = F.l1_loss(log_mel(y), log_mel(y_g_hat)) * 45
            _, fake, fmap_r, fmap_g = msd(y, y_g_hat)
            (generator_loss(fake) + feature_loss(fmap_r, fmap_g) + loss_mel).backward()
            optim_g.step()

    return TrainLoop(
        model={"generator": generator, "msd": msd}, optimizer=[optim_g, optim_d], batches=loader, fit=train
    )


@right(
    "speech",
    "real is 0 and fake is 1 throughout: adv_loss maps is_real so in both networks' losses, so the game is the same",
    thread="https-deeplearning-ai/GANs-Public#1",
)
def flipped_labels():
    generator, disc = Synth(), ScaleDiscriminator()
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*tones(seed=3)), batch_size=6)

    class Loss(nn.Module):
        def adv_loss(self, x, is_real):
            target = torch.zeros_like(x) if is_real else torch.ones_like(x)
            return F.binary_cross_entropy_with_logits(x, target)

        def forward(self, controls, real):
            fake = generator(controls)
            g_loss = 0.1 * self.adv_loss(disc(fake)[0], True) + F.mse_loss(fake, real)
            d_loss = 0.5 * (self.adv_loss(disc(real)[0], True) + self.adv_loss(disc(fake.detach())[0], False))
            return g_loss, d_loss

    loss_fn = Loss()

    def fit(batches):
        for controls, real in batches:
            g_loss, d_loss = loss_fn(controls, real)
            opt_g.zero_grad()
            g_loss.backward()
            opt_d.zero_grad()
            d_loss.backward()
            opt_g.step()
            opt_d.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": disc}, optimizer=[opt_g, opt_d], batches=loader, fit=fit
    )


@right(
    "speech",
    "hinge: D takes relu(1 - real) + relu(1 + fake) of raw scores, and G maximises its score without a bound",
    thread="descriptinc/melgan-neurips, scripts/train.py",
)
def melgan_hinge():
    net_g, net_d = Synth(), MSD()
    opt_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loader = DataLoader(TensorDataset(*tones(seed=4)), batch_size=6)

    def fit(batches):
        for s_t, x_t in batches:
            x_pred_t = net_g(s_t)
            real, fake, _, _ = net_d(x_t, x_pred_t.detach())
            loss_d = sum(F.relu(1 - r).mean() for r in real) + sum(F.relu(1 + f).mean() for f in fake)
            net_d.zero_grad()
            loss_d.backward()
            opt_d.step()

            _, fake, fmap_r, fmap_g = net_d(x_t, x_pred_t)
            loss_g = sum(-f.mean() for f in fake)
            loss_feat = 0
            for fr, fg in zip(fmap_r, fmap_g, strict=True):
                for r, g in zip(fr, fg, strict=True):
                    loss_feat = loss_feat + 0.5 * F.l1_loss(g, r.detach())
            net_g.zero_grad()
            (loss_g + 10 * loss_feat).backward()
            opt_g.step()

    return TrainLoop(model={"netG": net_g, "netD": net_d}, optimizer=[opt_g, opt_d], batches=loader, fit=fit)


@right(
    "speech",
    "spectral convergence divides one Frobenius norm by another, both over the whole batch",
    thread="facebookresearch/denoiser#150",
)
def stft_loss():
    class STFTLoss(nn.Module):
        def __init__(self, fft_size, shift_size, win_length):
            super().__init__()
            self.args = (fft_size, shift_size, win_length)
            self.register_buffer("window", torch.hann_window(win_length))

        def mag(self, x):
            spec = torch.view_as_real(torch.stft(x, *self.args, self.window, return_complex=True))
            return torch.sqrt(torch.clamp(spec[..., 0] ** 2 + spec[..., 1] ** 2, min=1e-7)).transpose(2, 1)

        def forward(self, x, y):
            x_mag, y_mag = self.mag(x), self.mag(y)
            sc_loss = torch.norm(y_mag - x_mag, p="fro") / torch.norm(y_mag, p="fro")
            mag_loss = F.l1_loss(torch.log(y_mag), torch.log(x_mag))
            return sc_loss, mag_loss

    model = Synth()
    losses = nn.ModuleList([STFTLoss(64, 16, 64), STFTLoss(32, 8, 24)])
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader = DataLoader(TensorDataset(*tones(seed=5)), batch_size=6)

    def fit(batches):
        for controls, clean in batches:
            estimate = model(controls)
            loss = F.l1_loss(clean, estimate)
            for f in losses:
                sc_loss, mag_loss = f(estimate, clean)
                loss = loss + 0.5 * sc_loss / len(losses) + 0.5 * mag_loss / len(losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "the codebook is a buffer that a running average moves; codes get no gradient, only the commitment loss trains",
    thread="openai/jukebox#129",
)
def ema_codebook():
    class EMACodebook(nn.Module):
        def __init__(self, codes=16, dim=8, mu=0.9):
            super().__init__()
            self.mu = mu
            self.register_buffer("k", 0.5 * torch.randn(codes, dim))
            self.register_buffer("k_sum", self.k.clone())
            self.register_buffer("k_elem", torch.ones(codes))

        @torch.no_grad()
        def update_k(self, x, ids):
            onehot = F.one_hot(ids, len(self.k)).float()
            self.k_sum.mul_(self.mu).add_(onehot.t() @ x, alpha=1 - self.mu)
            self.k_elem.mul_(self.mu).add_(onehot.sum(0), alpha=1 - self.mu)
            self.k.copy_(self.k_sum / self.k_elem[:, None].clamp(min=1e-3))

        def forward(self, x):
            ids = torch.cdist(x, self.k).argmin(-1)
            x_d = self.k[ids].clone()
            if self.training:
                self.update_k(x, ids)
            commit_loss = torch.norm(x_d.detach() - x) ** 2 / x.numel()
            return x + (x_d - x).detach(), commit_loss

    class VQVAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8))
            self.bottleneck = EMACodebook()
            self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 256))

        def forward(self, x):
            z, commit = self.bottleneck(self.encoder(x))
            return F.mse_loss(self.decoder(z), x) + 0.02 * commit

    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(tones(seed=6)[1]), batch_size=8)

    def fit(batches):
        model.train()
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "residual quantisation: each stage has a codebook and a commitment term with its own detach",
    thread="lucidrains/vector-quantize-pytorch, residual_vq.py",
)
def residual_vq():
    class Stage(nn.Module):
        def __init__(self, codes=12, dim=8):
            super().__init__()
            self.embed = nn.Parameter(0.3 * torch.randn(codes, dim))

        def forward(self, x):
            ids = torch.cdist(x.detach(), self.embed.detach()).argmin(-1)
            q = self.embed[ids]
            loss = F.mse_loss(q, x.detach()) + 0.25 * F.mse_loss(x, q.detach())
            return x + (q - x).detach(), loss

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8))
            self.layers = nn.ModuleList(Stage() for _ in range(3))
            self.dec = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 256))

        def forward(self, wave):
            residual, out, losses = self.enc(wave), 0.0, []
            for layer in self.layers:
                quantized, loss = layer(residual)
                residual = residual - quantized.detach()
                out = out + quantized
                losses.append(loss)
            return self.dec(out), torch.stack(losses)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(tones(seed=7)[1]), batch_size=8)

    def fit(batches):
        for (x,) in batches:
            recon, vq_losses = model(x)
            loss = F.l1_loss(recon, x) + vq_losses.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "a WaveNet classifies mu-law levels; input and target are one wave, shifted by one behind causal padding",
    thread="r9y9/wavenet_vocoder, mulaw-quantize",
)
def wavenet():
    levels = 32

    class WaveNet(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.embed = nn.Embedding(levels, width)
            self.convs = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**i) for i in range(4))
            self.out = nn.Conv1d(width, levels, 1)

        def forward(self, x):
            h = self.embed(x).transpose(1, 2)
            for conv in self.convs:
                h = h + torch.tanh(conv(F.pad(h, (conv.dilation[0], 0))))
            return self.out(h)

    def mulaw(wave):
        mu = levels - 1
        y = wave.sign() * torch.log1p(mu * wave.abs()) / math.log1p(mu)
        return ((y + 1) / 2 * mu + 0.5).long()

    model = WaveNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    wave = tones(length=64, seed=8)[1]
    tokens = mulaw(wave / wave.abs().amax(-1, keepdim=True))
    loader = DataLoader(TensorDataset(tokens), batch_size=6)

    def fit(batches):
        for (x,) in batches:
            y_hat = model(x)
            loss = F.cross_entropy(y_hat[:, :, :-1], x[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "mel and stop-token losses are means over valid frames only, and the stop token is weighted by 8",
    thread="coqui-ai/TTS#673",
)
def masked_tts():
    class TTS(nn.Module):
        def __init__(self, mels=10):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 16)
            self.rnn = nn.GRU(16, 24, batch_first=True)
            self.mel, self.stop = nn.Linear(24, mels), nn.Linear(24, 1)

        def forward(self, text):
            h, _ = self.rnn(self.embed(text))
            return self.mel(h), self.stop(h).squeeze(-1)

    model = TTS()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(9)
    table = torch.randn(VOCAB, 10, generator=g)
    lengths = torch.randint(4, 9, (24,), generator=g)
    items = [torch.randint(1, VOCAB, (int(k),), generator=g) for k in lengths]

    def collate(texts):
        stop = [F.one_hot(torch.tensor(len(t) - 1), len(t)).float() for t in texts]
        return {"text": pad(texts), "mel": pad([table[t] for t in texts]), "stop": pad(stop)}

    def fit(batches):
        for b in batches:
            mask = (b["text"] != 0).float()
            mel, stop = model(b["text"])
            mel_loss = ((mel - b["mel"]).abs() * mask[..., None]).sum() / (mask.sum() * mel.shape[-1])
            weight = mask * (1 + 7 * b["stop"])
            stop_loss = F.binary_cross_entropy_with_logits(stop, b["stop"], weight=weight, reduction="sum")
            optimizer.zero_grad()
            (mel_loss + stop_loss / mask.sum()).backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(items, batch_size=6, collate_fn=collate),
        fit=fit,
        padding=Padding(pad_id=0, dim=1),
    )


@right(
    "speech",
    "the error in dB has a floor: log10 of the error plus a share of the signal, so that good rows stop counting",
    thread="google-research/sound-separation, MixIT's thresholded SNR",
)
def thresholded_snr():
    model = Separator(sources=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mix, sources = mixtures(seed=10)
    slow = sources.diff(dim=-1).abs().sum(-1).argmin(1)
    target = sources[torch.arange(len(mix)), slow]
    loader = DataLoader(TensorDataset(mix, target), batch_size=6)

    def snr_loss(est, ref, snr_max=30.0):
        tau = 10 ** (-snr_max / 10)
        power = ref.square().sum(-1)
        return 10 * torch.log10((ref - est).square().sum(-1) + tau * power) - 10 * torch.log10(power)

    def fit(batches):
        for mix, ref in batches:
            optimizer.zero_grad()
            snr_loss(model(mix)[:, 0], ref).mean().backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "phases are compared by |d - 2 pi round(d / 2 pi)|: rounding has no gradient, and that of the rest is right",
    thread="yangai520/APNet, anti-wrapping losses",
)
def phase_loss():
    class PhaseNet(nn.Module):
        def __init__(self, bins=17):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU())
            self.r, self.i = nn.Linear(32, bins), nn.Linear(32, bins)

        def forward(self, x):
            h = self.net(x)
            return torch.atan2(self.i(h), self.r(h))

    model = PhaseNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    controls, wave = tones(seed=11)
    phase = torch.fft.rfft(wave[:, :32] * torch.hann_window(32)).angle()
    loader = DataLoader(TensorDataset(controls, phase), batch_size=6)

    def anti_wrapping(x):
        return torch.abs(x - torch.round(x / (2 * math.pi)) * 2 * math.pi)

    def fit(batches):
        for x, p in batches:
            p_hat = model(x)
            ip_loss = anti_wrapping(p - p_hat).mean()
            gd_loss = anti_wrapping(p.diff(dim=-1) - p_hat.diff(dim=-1)).mean()
            optimizer.zero_grad()
            (ip_loss + gd_loss).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "durations are compared as log(d + 1), and the sum of squares is divided by the characters of the batch",
    thread="janvainer/speedyspeech#19",
)
def duration_predictor():
    class DurationPredictor(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 16, padding_idx=0)
            self.conv = nn.Conv1d(16, 16, 3, padding=1)
            self.out = nn.Linear(16, 1)

        def forward(self, text):
            h = F.relu(self.conv(self.embed(text).transpose(1, 2))).transpose(1, 2)
            return self.out(h).squeeze(-1)

    model = DurationPredictor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(12)
    table = torch.randint(1, 20, (VOCAB,), generator=g)
    texts = [torch.randint(1, VOCAB, (int(k),), generator=g) for k in torch.randint(3, 9, (24,), generator=g)]

    def collate(items):
        return pad(items), pad([table[t] for t in items]), torch.tensor([len(t) for t in items])

    def duration_loss(log_pred, durations, lengths):
        mask = torch.arange(log_pred.shape[1])[None] < lengths[:, None]
        error = (log_pred - torch.log(durations.float() + 1)).square()
        return error.masked_fill(~mask, 0).sum() / lengths.sum()

    def fit(batches):
        for text, durations, lengths in batches:
            loss = duration_loss(model(text), durations, lengths)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(texts, batch_size=6, collate_fn=collate), fit=fit
    )


@right(
    "speech",
    "labels of -100 are masked out by hand before ctc_loss, and padding and blank are one id, 0",
    thread="huggingface/transformers#10145",
)
def wav2vec2_ctc():

    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=6,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        mask_time_prob=0.0,
        layerdrop=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
    )
    model = Wav2Vec2ForCTC(config)
    g = torch.Generator().manual_seed(13)
    pitch = 0.05 * torch.arange(1, 7)
    items = []
    for _ in range(16):
        chars = torch.randint(1, 6, (int(torch.randint(2, 4, (1,), generator=g)),), generator=g)
        wave = torch.cat([torch.sin(2 * math.pi * pitch[c] * torch.arange(48)) for c in chars])
        items.append({"input_values": wave, "labels": chars})

    def collate(features):
        waves = [f["input_values"] for f in features]
        return {
            "input_values": pad(waves),
            "attention_mask": pad([torch.ones(len(w), dtype=torch.long) for w in waves]),
            "labels": pad([f["labels"] for f in features], -100),
        }

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(batches):
        model.train()
        for batch in batches:
            outputs = model(**batch)
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()

    loader = DataLoader(items, batch_size=4, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "guided attention: weights far from the diagonal cost, those on it do not, so that the least is where they are 0",
    thread="espnet/espnet#816",
)
def guided_attention():
    class Seq2Mel(nn.Module):
        def __init__(self, mels=8, dim=16):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, dim)
            self.pos = nn.Embedding(32, dim)
            self.query = nn.Linear(mels, dim)
            self.out = nn.Linear(dim, mels)

        def forward(self, text, mel):
            t = torch.arange(mel.shape[1])
            keys = self.embed(text) + self.pos(4 * torch.arange(text.shape[1]))
            shifted = F.pad(mel, (0, 0, 1, 0))[:, :-1]
            att = ((self.query(shifted) + self.pos(t)) @ keys.transpose(1, 2)).softmax(-1)
            return self.out(att @ self.embed(text)), att

    model = Seq2Mel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(14)
    text = torch.randint(1, VOCAB, (24, 5), generator=g)
    mel = torch.randn(VOCAB, 8, generator=g)[text].repeat_interleave(4, 1)
    loader = DataLoader(TensorDataset(text, mel), batch_size=6)

    def guided(att, sigma=0.4):
        t = torch.arange(att.shape[1]) / att.shape[1]
        n = torch.arange(att.shape[2]) / att.shape[2]
        weights = 1.0 - torch.exp(-((n[None] - t[:, None]) ** 2) / (2 * sigma**2))
        return (weights * att).mean()

    def fit(batches):
        for text, mel in batches:
            pred, att = model(text, mel)
            loss = F.l1_loss(pred, mel) + 1.0 * guided(att)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
