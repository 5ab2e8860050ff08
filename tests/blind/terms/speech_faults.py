"""Speech in small, from public threads."""

import itertools
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import fault

VOCAB = 8


def utterances(n=24, max_len=4, per_char=4, dim=12, seed=0, full=False):
    """Feature frames that spell a transcript: each character lasts a few frames. Characters are 1..VOCAB - 1."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randn(VOCAB, dim, generator=g)
    texts, lengths = torch.zeros(n, max_len, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    feats, frames = torch.zeros(n, max_len * per_char, dim), torch.zeros(n, dtype=torch.long)
    for i in range(n):
        k = max_len if full else int(torch.randint(2, max_len + 1, (1,), generator=g))
        chars = torch.randint(1, VOCAB, (k,), generator=g)
        texts[i, :k], lengths[i], frames[i] = chars, k, k * per_char
        feats[i, : k * per_char] = codes[chars].repeat_interleave(per_char, 0)
    feats += 0.1 * torch.randn(feats.shape, generator=g) * (feats != 0)
    return feats, frames, texts, lengths


class Acoustic(nn.Module):
    def __init__(self, dim=12, vocab=VOCAB, hidden=24):
        super().__init__()
        self.conv = nn.Conv1d(dim, hidden, 3, padding=1)
        self.lin = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, feats):
        h = F.relu(self.conv(feats.transpose(1, 2))).transpose(1, 2)
        return self.out(F.relu(self.lin(h)))


@fault(
    "speech",
    "ctc_loss gets the logits of the frames, and takes log-probabilities",
    thread="gwx314/STARS#9",
    check="loss_contract",
)
def phone_alignment():
    model = Acoustic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    feats, frames, texts, lengths = utterances()
    data = TensorDataset(feats, frames, texts, lengths)
    loader = DataLoader(data, batch_size=6, shuffle=True)

    def run_model(batch):
        feats, frames, ph, ph_lengths = batch
        ph_frame_logits = model(feats)
        losses = {}
        losses["ph_ctc"] = F.ctc_loss(
            ph_frame_logits.transpose(0, 1), ph, frames, ph_lengths, blank=0, zero_infinity=True
        )
        return losses

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            sum(run_model(batch).values()).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "speech",
    "log_softmax without dim takes axis 0 of a (T, N, C) output: it is normalised over time",
    thread="bentrevett/pytorch-seq2seq#177",
    check="loss_contract",
)
def grapheme_ctc():
    model = Acoustic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    feats, frames, texts, lengths = utterances(seed=1)
    loader = DataLoader(TensorDataset(feats, frames, texts, lengths), batch_size=6)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def train(iterator):
        model.train()
        for src, src_len, trg, trg_len in iterator:
            optimizer.zero_grad()
            output = model(src).transpose(0, 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output_softmax = F.log_softmax(output)
            loss = criterion(output_softmax, trg, src_len, trg_len)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "speech",
    "input_lengths is the padded length for every row, so that frames of padding are aligned and trained",
    thread="thu-spmi/CAT#22",
    check="padding_invariance",
)
def ctc_trainer():
    model = Acoustic()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    feats, frames, texts, lengths = utterances(seed=2)
    data = [
        {"speech": f, "speech_lengths": n, "text": t, "text_lengths": k}
        for f, n, t, k in zip(feats, frames, texts, lengths, strict=True)
    ]
    loader = DataLoader(data, batch_size=6)
    ctc = nn.CTCLoss(zero_infinity=True)

    class Trainer:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def step(self, batch):
            log_probs = self.model(batch["speech"]).log_softmax(-1).transpose(0, 1)
            t, n, _ = log_probs.shape
            input_lengths = torch.full((n,), t, dtype=torch.long)
            return ctc(log_probs, batch["text"], input_lengths, batch["text_lengths"])

        def fit(self, batches):
            for batch in batches:
                self.optimizer.zero_grad()
                self.step(batch).backward()
                self.optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=lambda batches: Trainer(model, optimizer).fit(batches),
        padding=[Padding(pad_id=0, dim=1, of=("speech",)), Padding(pad_id=0, dim=1, of=("text",))],
    )


def tones(n=24, length=256, seed=0):
    """Sums of two sines, and the frequencies and levels that made them."""
    g = torch.Generator().manual_seed(seed)
    f = 0.02 + 0.2 * torch.rand(n, 2, generator=g)
    a = 0.3 + 0.5 * torch.rand(n, 2, generator=g)
    t = torch.arange(length)
    wave = (a[..., None] * torch.sin(2 * torch.pi * f[..., None] * t)).sum(1)
    return torch.cat([f * 4, a], -1), wave


class Synth(nn.Module):
    """Parameters of a tone to its waveform."""

    def __init__(self, length=256, hidden=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, length)

    def forward(self, x):
        return self.out(self.net(x))


@fault(
    "speech",
    "amp squares the first two frames x[:, :, 0] and x[:, :, 1], not the real and imaginary part of the last axis",
    thread="acids-ircam/ddsp_pytorch#3",
    check="loss_formula",
)
def multi_scale_stft():
    class MSSTFTLoss(nn.Module):
        def __init__(self, scales=(32, 64), overlap=0.75):
            super().__init__()
            self.scales, self.overlap = scales, overlap
            self.windows = nn.ParameterList(
                nn.Parameter(torch.hann_window(scale), requires_grad=False) for scale in scales
            )

        def stft(self, x, i):
            scale = self.scales[i]
            hop = int((1 - self.overlap) * scale)
            return torch.view_as_real(
                torch.stft(x, scale, hop, window=self.windows[i], center=False, return_complex=True)
            )

        def forward(self, x, y):
            def amp(x):
                return x[:, :, 0] ** 2 + x[:, :, 1] ** 2

            total = 0
            for i in range(len(self.scales)):
                a, b = amp(self.stft(x, i)), amp(self.stft(y, i))
                lin = (a - b).abs().mean()
                log = (torch.log(a + 1e-4) - torch.log(b + 1e-4)).abs().mean()
                total = total + lin + log
            return total

    model = Synth()
    loss_fn = MSSTFTLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*tones()), batch_size=6)

    def fit(batches):
        for controls, audio in batches:
            optimizer.zero_grad()
            loss_fn(model(controls), audio).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


class VectorQuantizer(nn.Module):
    def __init__(self, codes=16, dim=8):
        super().__init__()
        self.codebook = nn.Embedding(codes, dim)
        nn.init.uniform_(self.codebook.weight, -0.5, 0.5)

    def forward(self, x):
        d = torch.cdist(x, self.codebook.weight)
        indices = d.argmin(-1)
        z = self.codebook(indices)
        z_q = x + (z - x).detach()
        return z_q, z, x, indices


@fault(
    "speech",
    "the codebook loss is computed of the straight-through output z_q, in which the code is detached",
    thread="showlab/Olaf-World#8",
    check="gradient_reaches_every_param",
)
def codec():
    class Codec(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8))
            self.vq = VectorQuantizer()
            self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 256))

        def forward(self, wave):
            z_q, _, z_e, _ = self.vq(self.encoder(wave))
            return {"recon": self.decoder(z_q), "z_q": z_q, "z_e": z_e}

    model = Codec()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(tones(seed=3)[1]), batch_size=8)

    def training_step(batch):
        out = model(batch[0])
        recon_loss = F.mse_loss(out["recon"], batch[0])
        codebook_loss = F.mse_loss(out["z_q"], out["z_e"].detach())
        commit_loss = F.mse_loss(out["z_e"], out["z_q"].detach())
        return recon_loss + codebook_loss + 0.25 * commit_loss

    def fit(batches):
        for batch in batches:
            loss = training_step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


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


class MultiScaleDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.discriminators = nn.ModuleList([ScaleDiscriminator(1), ScaleDiscriminator(2)])

    def forward(self, x):
        scores, feats = zip(*[d(x) for d in self.discriminators], strict=True)
        return list(scores), list(feats)


def vocoder(seed):
    generator, discriminator = Synth(), MultiScaleDiscriminator()
    optim_g = torch.optim.AdamW(generator.parameters(), 1e-3, betas=(0.8, 0.99))
    optim_d = torch.optim.AdamW(discriminator.parameters(), 1e-3, betas=(0.8, 0.99))
    loader = DataLoader(TensorDataset(*tones(seed=seed)), batch_size=6)
    return generator, discriminator, optim_g, optim_d, loader


@fault(
    "speech",
    "the feature matching takes disc_fake, made of the detached waveform, where disc_fake_g was meant: no gradient",
    thread="rishikksh20/TFGAN#7",
    check="every_term_trains",
)
def tfgan():
    generator, discriminator, optim_g, optim_d, loader = vocoder(4)

    def train(batches, lambda_fm=10.0):
        for controls, audio in batches:
            fake_audio = generator(controls)
            with torch.no_grad():
                _, real_feats = discriminator(audio)
                _, disc_fake = discriminator(fake_audio.detach())
            disc_fake_g, _ = discriminator(fake_audio)
            adv_loss = sum(((score - 1) ** 2).mean() for score in disc_fake_g)
            feat_loss = 0.0
            for ff, rf in zip(disc_fake, real_feats, strict=True):
                for f, r in zip(ff, rf, strict=True):
                    feat_loss = feat_loss + F.l1_loss(f, r.detach())
            optim_g.zero_grad()
            (adv_loss + lambda_fm * feat_loss + F.l1_loss(fake_audio, audio)).backward()
            optim_g.step()

            real_scores, _ = discriminator(audio)
            fake_scores, _ = discriminator(fake_audio.detach())
            loss_d = sum(((r - 1) ** 2).mean() + (f**2).mean() for r, f in zip(real_scores, fake_scores, strict=True))
            optim_d.zero_grad()
            loss_d.backward()
            optim_d.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[optim_g, optim_d],
        batches=loader,
        fit=train,
    )


@fault(
    "speech",
    "real_loss and fake_loss are overwritten in the loop: only the last discriminator is trained",
    thread="coqui-ai/TTS#3153",
    check="every_term_trains",
)
def vocoder_d_loss():
    generator, discriminator, optim_g, optim_d, loader = vocoder(5)

    def mse_d_loss(score_fake, score_real):
        real, fake = F.mse_loss(score_real, torch.ones_like(score_real)), (score_fake**2).mean()
        return real + fake, real, fake

    def _apply_d_loss(scores_fake, scores_real, loss_func):
        loss, real_loss, fake_loss = 0, 0, 0
        for score_fake, score_real in zip(scores_fake, scores_real, strict=True):
            total_loss, real_loss, fake_loss = loss_func(score_fake=score_fake, score_real=score_real)
            loss = total_loss
        return loss, real_loss, fake_loss

    def fit(batches):
        for controls, audio in batches:
            y_hat = generator(controls)
            scores_fake, _ = discriminator(y_hat.detach())
            scores_real, _ = discriminator(audio)
            loss_d, _, _ = _apply_d_loss(scores_fake, scores_real, mse_d_loss)
            optim_d.zero_grad()
            loss_d.backward()
            optim_d.step()

            scores, _ = discriminator(y_hat)
            loss_g = sum(F.mse_loss(s, torch.ones_like(s)) for s in scores) / len(scores)
            loss_g = loss_g + 5 * F.l1_loss(y_hat, audio)
            optim_g.zero_grad()
            loss_g.backward()
            optim_g.step()

    return TrainLoop(
        model={"generator": generator, "discriminator": discriminator},
        optimizer=[optim_g, optim_d],
        batches=loader,
        fit=fit,
    )


@fault(
    "speech",
    "LSGAN squares the mean of D(x) - 1, not each score: (mean - 1)^2 where mean((score - 1)^2) is meant",
    thread="akanimax/pro_gan_pytorch#13",
    check="loss_formula",
)
def lsgan_vocoder():
    generator, discriminator, optim_g, optim_d, loader = vocoder(6)

    class LSGAN:
        def __init__(self, dis):
            self.dis = dis

        def dis_loss(self, real_samps, fake_samps):
            total = 0
            for r, f in zip(self.dis(real_samps)[0], self.dis(fake_samps)[0], strict=True):
                total = total + 0.5 * (((torch.mean(r) - 1) ** 2) + (torch.mean(f)) ** 2)
            return total

        def gen_loss(self, fake_samps):
            return sum(0.5 * ((torch.mean(f) - 1) ** 2) for f in self.dis(fake_samps)[0])

    criterion = LSGAN(discriminator)

    def optimize_discriminator(controls, real):
        loss = criterion.dis_loss(real, generator(controls).detach())
        optim_d.zero_grad()
        loss.backward()
        optim_d.step()

    def optimize_generator(controls, real):
        fake = generator(controls)
        loss = criterion.gen_loss(fake) + 3 * F.l1_loss(fake, real)
        optim_g.zero_grad()
        loss.backward()
        optim_g.step()

    def train(batches):
        for controls, real in batches:
            optimize_discriminator(controls, real)
            optimize_generator(controls, real)

    return TrainLoop(
        model={"gen": generator, "dis": discriminator}, optimizer=[optim_g, optim_d], batches=loader, fit=train
    )


def mixtures(n=24, length=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length)
    f = torch.stack([0.02 + 0.05 * torch.rand(n, generator=g), 0.2 + 0.2 * torch.rand(n, generator=g)], 1)
    phase = 6.28 * torch.rand(n, 2, 1, generator=g)
    sources = torch.sin(2 * torch.pi * f[..., None] * t + phase)
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
        est = self.dec((w[:, None] * m).flatten(0, 1))
        return est.view(len(mix), self.sources, -1)


@fault(
    "speech",
    "s_target is divided by the energy of the estimate, where the projection takes that of the source",
    thread="kaituoxu/Conv-TasNet#1",
    check="loss_formula",
)
def enhancement():
    model = Separator(sources=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mix, sources = mixtures(seed=7)
    low = torch.where(sources[:, 0, :8].diff().abs().sum(-1) < sources[:, 1, :8].diff().abs().sum(-1), 0, 1)
    target = sources[torch.arange(len(sources)), low]
    loader = DataLoader(TensorDataset(mix, target), batch_size=6)

    def si_snr(source, estimate_source, eps=1e-8):
        source = source - source.mean(-1, keepdim=True)
        estimate_source = estimate_source - estimate_source.mean(-1, keepdim=True)
        pair_wise_dot = torch.sum(source * estimate_source, -1, keepdim=True)
        s_target_energy = torch.sum(estimate_source**2, -1, keepdim=True) + eps
        s_target = pair_wise_dot * source / s_target_energy
        e_noise = estimate_source - s_target
        snr = torch.sum(s_target**2, -1) / (torch.sum(e_noise**2, -1) + eps)
        return 10 * torch.log10(snr + eps)

    def fit(batches):
        for mix, clean in batches:
            optimizer.zero_grad()
            loss = -si_snr(clean, model(mix)[:, 0]).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "speech",
    "the permutation is chosen for the whole batch: the mean over rows is taken before the minimum",
    thread="snsun/pit-speech-separation#5",
    check="batch_independence",
)
def separation():
    model = Separator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*mixtures(seed=8)), batch_size=6, shuffle=True)

    def pit_loss(est, ref):
        perms = itertools.permutations(range(ref.shape[1]))
        return torch.stack([F.mse_loss(est[:, list(perm)], ref) for perm in perms]).min()

    def train(batches):
        for mix, sources in batches:
            loss = pit_loss(model(mix), sources)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "speech",
    "mel_output is clamped at 2.0 while the log-mels of the targets reach higher: loud frames cannot be learned",
    thread="igorshmukler/kokoro-ruslan#85",
    check="learnable_targets",
)
def acoustic_model():
    class MelDecoder(nn.Module):
        def __init__(self, chars=VOCAB, mels=10):
            super().__init__()
            self.embed = nn.Embedding(chars, 16)
            self.conv = nn.Conv1d(16, 24, 3, padding=1)
            self.proj = nn.Linear(24, mels)

        def forward(self, text):
            h = F.relu(self.conv(self.embed(text).transpose(1, 2))).transpose(1, 2)
            mel_output = self.proj(h)
            return mel_output.clamp(min=-11.5, max=2.0)

    model = MelDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(9)
    text = torch.randint(0, VOCAB, (24, 12), generator=g)
    levels = 8 * torch.rand(VOCAB, 10, generator=g) - 0.5
    mels = levels[text] + 0.05 * torch.randn(24, 12, 10, generator=g)
    loader = DataLoader(TensorDataset(text, mels), batch_size=6)

    def train_epoch(batches):
        model.train()
        for text, mel in batches:
            optimizer.zero_grad()
            loss = F.l1_loss(model(text), mel)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train_epoch)
