"""Right loops about speech that look odd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import TrainLoop
from tests.blind.cases import right

MELS = 8


def utterances(n=32, low=20, high=41, seed=0):
    generator = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(n):
        frames = int(torch.randint(low, high, (1,), generator=generator))
        text = torch.randint(1, 10, (int(torch.randint(2, 4, (1,), generator=generator)),), generator=generator)
        items.append((torch.randn(frames, MELS, generator=generator) + 0.5, text))
    return items


def collate(items):
    feats, texts = zip(*items, strict=True)
    return {
        "feats": pad_sequence(feats, batch_first=True),
        "feat_lengths": torch.tensor([len(f) for f in feats]),
        "targets": pad_sequence(texts, batch_first=True),
        "target_lengths": torch.tensor([len(t) for t in texts]),
    }


def length_mask(lengths, width):
    return torch.arange(width) < lengths[:, None]


@right(
    "speech",
    "lengths behind the strided convolutions are computed by the convolution's formula from each row's own length",
    thread="espnet/espnet#6633",
)
def subsampled_ctc():
    torch.manual_seed(0)

    class Subsampling(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv1d(MELS, dim, 3, stride=2), nn.Conv1d(dim, dim, 3, stride=2)])
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.ctc = nn.Linear(dim, 11)

        def forward(self, feats, lengths):
            x = feats.transpose(1, 2)
            for conv in self.convs:
                lengths = (lengths - 3) // 2 + 1
                x = conv(x).relu()
            x = x.transpose(1, 2)
            mask = length_mask(lengths, x.shape[1])
            return self.ctc(self.layer(x, src_key_padding_mask=~mask)), lengths

    model = Subsampling()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for b in batches:
            logits, lengths = model(b["feats"], b["feat_lengths"])
            log_probs = logits.log_softmax(-1).transpose(0, 1)
            loss = F.ctc_loss(log_probs, b["targets"], lengths, b["target_lengths"], zero_infinity=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(utterances(), batch_size=8, collate_fn=collate), fit=fit
    )


@right(
    "speech",
    "targets of all rows are one flat tensor, cut up by target_lengths inside the loss",
    thread="https://r-packages.io/packages/torch/nn_ctc_loss",
)
def flat_targets():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.fc = nn.GRU(MELS, 24, batch_first=True), nn.Linear(24, 11)

        def forward(self, x):
            return self.fc(self.rnn(x)[0])

    model, criterion = Net(), nn.CTCLoss(reduction="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)

    def train(batches):
        for b in batches:
            log_probs = model(b["feats"]).transpose(0, 1).log_softmax(-1)
            flat = torch.cat([row[:size] for row, size in zip(b["targets"], b["target_lengths"].tolist(), strict=True)])
            loss = criterion(log_probs, flat, b["feat_lengths"], b["target_lengths"]) / len(b["feats"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 400)
            optimizer.step()

    loader = DataLoader(utterances(seed=1), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@right(
    "speech",
    "each depthwise convolution is preceded by a mask that sets padded frames to zero, the norm is a "
    "layer norm of each frame",
    thread="espnet/espnet#6660",
)
def masked_convolutions():
    torch.manual_seed(0)

    class Conformer(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.embed, self.point = nn.Linear(MELS, dim), nn.Linear(dim, 2 * dim)
            self.depthwise, self.norm = nn.Conv1d(dim, dim, 5, padding=2, groups=dim), nn.LayerNorm(dim)
            self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
            self.ctc = nn.Linear(dim, 11)

        def forward(self, feats, lengths):
            mask = length_mask(lengths, feats.shape[1])
            x = self.embed(feats)
            y = F.glu(self.point(x), dim=-1).masked_fill(~mask.unsqueeze(-1), 0.0)
            x = x + F.silu(self.norm(self.depthwise(y.transpose(1, 2)).transpose(1, 2)))
            x = x + self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
            return self.ctc(x)

    model = Conformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for b in batches:
            log_probs = model(b["feats"], b["feat_lengths"]).log_softmax(-1).transpose(0, 1)
            loss = F.ctc_loss(log_probs, b["targets"], b["feat_lengths"], b["target_lengths"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(utterances(seed=2), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "mel losses are taken over masked_select of real frames; the stop token's loss has a weight for positives",
    thread="espnet/espnet#1397",
)
def masked_select_mels():
    torch.manual_seed(0)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.prenet, self.lstm = nn.Linear(MELS, 16), nn.LSTM(16, 24, batch_first=True)
            self.mel, self.gate = nn.Linear(24, MELS), nn.Linear(24, 1)

        def forward(self, mels):
            hidden = self.lstm(self.prenet(F.pad(mels, (0, 0, 1, 0))[:, :-1]).relu())[0]
            return self.mel(hidden), self.gate(hidden).squeeze(-1)

    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    weight = torch.tensor(5.0)

    def train(batches):
        for b in batches:
            mels, lengths = b["feats"], b["feat_lengths"]
            mask = length_mask(lengths, mels.shape[1])
            out, gate = model(mels)
            stop = torch.zeros_like(gate).scatter(1, lengths.unsqueeze(1) - 1, 1.0)
            frames = mask.unsqueeze(-1)
            l1 = F.l1_loss(out.masked_select(frames), mels.masked_select(frames))
            bce = F.binary_cross_entropy_with_logits(gate[mask], stop[mask], pos_weight=weight.to(gate.dtype))
            optimizer.zero_grad()
            (l1 + bce).backward()
            optimizer.step()

    loader = DataLoader(utterances(seed=3), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@right(
    "speech",
    "audio is padded to a fixed window and the encoder has no attention mask: silence is part of the input of Whisper",
    thread="huggingface/transformers#19864",
)
def fixed_window():
    torch.manual_seed(0)

    class Whisper(nn.Module):
        def __init__(self, dim=16, frames=24):
            super().__init__()
            self.conv = nn.Conv1d(MELS, dim, 3, stride=2, padding=1)
            self.register_buffer("positions", torch.randn(frames // 2, dim) * 0.1)
            self.encoder = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
            self.tokens = nn.Embedding(12, dim)
            self.decoder = nn.TransformerDecoderLayer(dim, 2, 32, dropout=0.0, activation="gelu", batch_first=True)

        def forward(self, input_features, decoder_input_ids):
            audio = F.gelu(self.conv(input_features)).transpose(1, 2) + self.positions
            length = decoder_input_ids.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool).triu(1)
            hidden = self.decoder(self.tokens(decoder_input_ids), self.encoder(audio), tgt_mask=causal)
            return hidden @ self.tokens.weight.T

    def collator(items):
        feats = torch.stack([F.pad(f[:24], (0, 0, 0, max(0, 24 - len(f)))).T for f, _ in items])
        labels = pad_sequence([F.pad(t, (0, 1), value=11) for _, t in items], batch_first=True, padding_value=-100)
        shifted = F.pad(labels, (1, 0), value=10)[:, :-1]
        return {
            "input_features": feats,
            "labels": labels,
            "decoder_input_ids": shifted.masked_fill(shifted == -100, 11),
        }

    model = Whisper()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            logits = model(batch["input_features"], batch["decoder_input_ids"])
            loss = F.cross_entropy(logits.reshape(-1, 12), batch["labels"].reshape(-1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    loader = DataLoader(utterances(low=12, high=30, seed=4), batch_size=8, collate_fn=collator)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "lengths come relative to the longest row of the batch, as shares of the padded width, and are rounded to frames",
    thread="speechbrain/speechbrain#496",
)
def relative_lengths():
    torch.manual_seed(0)

    class Brain(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.ctc_lin = nn.LSTM(MELS, 24, batch_first=True), nn.Linear(24, 11)

        def compute_forward(self, wavs):
            return self.ctc_lin(self.encoder(wavs)[0]).log_softmax(-1)

        def compute_objectives(self, p_ctc, wav_lens, tokens, tokens_lens):
            input_lens = (wav_lens * p_ctc.shape[1]).round().long()
            target_lens = (tokens_lens * tokens.shape[1]).round().long()
            return F.ctc_loss(p_ctc.transpose(0, 1), tokens, input_lens, target_lens, zero_infinity=True)

    def padded_batch(items):
        b = collate(items)
        return {
            "wavs": b["feats"],
            "wav_lens": b["feat_lengths"] / b["feats"].shape[1],
            "tokens": b["targets"],
            "tokens_lens": b["target_lengths"] / b["targets"].shape[1],
        }

    model = Brain()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def fit_batch(batch):
        p_ctc = model.compute_forward(batch["wavs"])
        loss = model.compute_objectives(p_ctc, batch["wav_lens"], batch["tokens"], batch["tokens_lens"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    loader = DataLoader(utterances(seed=5), batch_size=8, collate_fn=padded_batch)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=lambda batches: [fit_batch(batch) for batch in batches]
    )


@right(
    "speech",
    "each utterance is standardised over its own frames, and padded frames are set to zero again behind it",
    thread="huggingface/transformers#10455",
)
def utterance_norm():
    torch.manual_seed(0)

    def normalize(feats, lengths):
        mask = length_mask(lengths, feats.shape[1]).unsqueeze(-1)
        count = lengths.view(-1, 1, 1)
        mean = (feats * mask).sum(1, keepdim=True) / count
        var = ((feats - mean).square() * mask).sum(1, keepdim=True) / count
        return (feats - mean) / torch.sqrt(var + 1e-5) * mask

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.query, self.out = nn.Linear(MELS, 16), nn.Linear(16, 1), nn.Linear(32, 5)

        def forward(self, feats, lengths):
            mask = length_mask(lengths, feats.shape[1])
            hidden = self.up(normalize(feats, lengths)).tanh()
            weights = self.query(hidden).squeeze(-1).masked_fill(~mask, float("-inf")).softmax(1).unsqueeze(-1)
            mean = (weights * hidden).sum(1)
            std = ((weights * hidden.square()).sum(1) - mean.square()).clamp(min=1e-6).sqrt()
            return self.out(torch.cat([mean, std], 1))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for b in batches:
            loss = F.cross_entropy(model(b["feats"], b["feat_lengths"]), b["targets"][:, 0] % 5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(utterances(seed=6), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "speech",
    "negatives of the contrastive loss are other frames of the same utterance (roll along time), never of other rows",
    thread="facebookresearch/fairseq#3118",
)
def contrastive_frames(negatives=4):
    torch.manual_seed(0)

    class Wav2Vec(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.features, self.context = nn.Linear(MELS, dim), nn.GRU(dim, dim, batch_first=True)
            self.predict, self.target = nn.Linear(dim, dim), nn.Linear(dim, dim)

        def forward(self, x):
            z = self.features(x)
            context, _ = self.context(z)
            return self.predict(context[:, :-1]), self.target(z[:, 1:])

    model = Wav2Vec()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    def fit(batches):
        for x in batches:
            prediction, target = model(x)
            others = torch.stack([target] + [target.roll(k, 1) for k in range(1, negatives + 1)], 2)
            logits = F.cosine_similarity(prediction.unsqueeze(2), others, dim=-1) / 0.1
            truth = torch.zeros(logits.shape[:2], dtype=torch.long)
            loss = F.cross_entropy(logits.flatten(0, 1), truth.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    generator = torch.Generator().manual_seed(7)
    data = [torch.randn(6, 18, MELS, generator=generator).cumsum(1) * 0.3 for _ in range(5)]
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@right(
    "speech",
    "bands of time and frequency of each row are set to the mean of the features by a mask that comes with the batch",
    thread="DemisEom/SpecAugment#6",
)
def spec_augment():
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(MELS, 24, 3, padding=1)
            self.norm, self.out = nn.BatchNorm1d(24), nn.Linear(24, 5)

        def forward(self, x):
            return self.out(self.norm(self.conv(x)).relu().mean(-1))

    generator = torch.Generator().manual_seed(8)
    data = []
    for _ in range(5):
        x = torch.randn(8, MELS, 20, generator=generator)
        hidden = torch.zeros_like(x, dtype=torch.bool)
        for row in range(8):
            start, band = (
                torch.randint(0, 14, (1,), generator=generator),
                torch.randint(0, 6, (1,), generator=generator),
            )
            hidden[row, :, start : start + 4] = True
            hidden[row, band : band + 2] = True
        data.append({"features": x, "masked": hidden, "label": torch.randint(0, 5, (8,), generator=generator)})
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def fit(batches):
        model.train()
        for batch in batches:
            x = batch["features"]
            x = torch.where(batch["masked"], x.mean((1, 2), keepdim=True), x)
            loss = F.cross_entropy(model(x), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)
