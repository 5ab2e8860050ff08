"""Faulty loops about speech: lengths after subsampling, masks of frames, norms of spectrograms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pytest_trainloop import Padding, TrainLoop
from tests.blind.cases import fault

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


@fault(
    "speech",
    "input_lengths of the CTC loss are the padded width for every utterance (torch.full), so blanks are "
    "learned on padding",
    thread="ShankHarinath/DeepSpeech2-Keras#3",
    check="padding_invariance",
)
def deep_speech():
    torch.manual_seed(0)

    class Acoustic(nn.Module):
        def __init__(self):
            super().__init__()
            self.frames = nn.Linear(MELS, 24)
            self.rnn = nn.GRU(24, 24, batch_first=True)
            self.fc = nn.Linear(24, 11)

        def forward(self, x):
            return self.fc(self.rnn(self.frames(x).clamp(0, 20))[0]).log_softmax(-1)

    model = Acoustic()
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    def train(batches):
        for batch in batches:
            output = model(batch["feats"]).transpose(0, 1)
            input_lengths = torch.full((output.shape[1],), output.shape[0], dtype=torch.long)
            loss = criterion(output, batch["targets"], input_lengths, batch["target_lengths"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(utterances(), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "speech",
    "mean and std of the spectrogram are taken over all frames, the padded ones too",
    thread="huggingface/transformers#13512",
    check="padding_invariance",
)
def keyword_spotter():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(MELS, 16)
            self.out = nn.Linear(16, 5)

        def forward(self, feats, lengths):
            mean, std = feats.mean(1, keepdim=True), feats.std(1, keepdim=True)
            mask = length_mask(lengths, feats.shape[1]).unsqueeze(-1)
            x = (feats - mean) / (std + 1e-5) * mask
            hidden = self.up(x).relu() * mask
            return self.out(hidden.sum(1) / lengths.unsqueeze(-1))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            logits = model(batch["feats"], batch["feat_lengths"])
            loss = F.cross_entropy(logits, batch["targets"][:, 0] % 5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(utterances(seed=1), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "speech",
    "GroupNorm of the convolution module takes its statistics over padded frames",
    thread="pytorch/audio#4205",
    check="padding_invariance",
)
def conformer_block():
    torch.manual_seed(0)

    class ConvModule(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            self.pointwise = nn.Conv1d(dim, 2 * dim, 1)
            self.depthwise = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
            self.group = nn.GroupNorm(1, dim)
            self.last = nn.Conv1d(dim, dim, 1)

        def forward(self, x, mask):
            y = F.glu(self.pointwise(self.norm(x).transpose(1, 2)), dim=1)
            y = self.depthwise(y.masked_fill(~mask.unsqueeze(1), 0.0))
            return x + self.last(F.silu(self.group(y))).transpose(1, 2)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(MELS, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.conv = ConvModule(16)
            self.ctc = nn.Linear(16, 11)

        def forward(self, feats, lengths):
            mask = length_mask(lengths, feats.shape[1])
            x = self.embed(feats)
            x = x + self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
            return self.ctc(self.conv(x, mask))

    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for b in batches:
            log_probs = model(b["feats"], b["feat_lengths"]).log_softmax(-1).transpose(0, 1)
            loss = F.ctc_loss(log_probs, b["targets"], b["feat_lengths"], b["target_lengths"], zero_infinity=True)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    loader = DataLoader(utterances(seed=2), batch_size=6, collate_fn=collate)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=fit, padding=Padding(pad_id=0, of=("feats",))
    )


@fault(
    "speech",
    "mse_loss of the mel frames averages over padded frames of shorter utterances",
    thread="NVIDIA/tacotron2#80",
    check="padding_invariance",
)
def text_to_mel():
    torch.manual_seed(0)

    class Tacotron2Loss(nn.Module):
        def forward(self, output, targets):
            mel, post = output
            return nn.MSELoss()(mel, targets) + nn.MSELoss()(post, targets)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.prenet = nn.Sequential(nn.Linear(MELS, 16), nn.ReLU())
            self.lstm = nn.LSTM(16, 24, batch_first=True)
            self.mel = nn.Linear(24, MELS)
            self.postnet = nn.Linear(MELS, MELS)

        def forward(self, mels):
            previous = F.pad(mels, (0, 0, 1, 0))[:, :-1]
            mel = self.mel(self.lstm(self.prenet(previous))[0])
            return mel, mel + self.postnet(mel)

    model, criterion = Decoder(), Tacotron2Loss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)

    def train(batches):
        for batch in batches:
            loss = criterion(model(batch["feats"]), batch["feats"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    loader = DataLoader(utterances(seed=3), batch_size=8, collate_fn=collate)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "speech",
    "the pooled embedding is the mean over all frames of the encoder, lengths are only used by the attention",
    thread="huggingface/transformers#35495",
    check="padding_invariance",
)
def emotion_classifier():
    torch.manual_seed(0)

    class EmotionNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(MELS, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.classifier = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, input_features, attention_mask):
            hidden = self.layer(self.project(input_features), src_key_padding_mask=~attention_mask.bool())
            return self.classifier(hidden.mean(dim=1))

    model = EmotionNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collator(items):
        batch = collate(items)
        mask = length_mask(batch["feat_lengths"], batch["feats"].shape[1]).long()
        return {"input_features": batch["feats"], "attention_mask": mask, "labels": batch["targets"][:, 0] % 4}

    def fit(batches):
        for batch in batches:
            logits = model(batch["input_features"], batch["attention_mask"])
            loss = F.cross_entropy(logits, batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    loader = DataLoader(utterances(seed=4), batch_size=8, collate_fn=collator)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "speech",
    "logits (N, T, C) are brought to (T, N, C) by view: frames of one utterance are scored with the text of another",
    thread="https://www.cnblogs.com/chenkui164/p/16359288.html",
    check="batch_independence",
)
def word_images():
    torch.manual_seed(0)

    class CRNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = nn.Conv1d(6, 16, 3, padding=1)
            self.rnn = nn.GRU(16, 16, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(32, 11)

        def forward(self, x):
            return self.fc(self.rnn(self.cnn(x).relu().transpose(1, 2))[0])

    model = CRNN()
    criterion = nn.CTCLoss()
    optimizer = torch.optim.Adadelta(model.parameters())

    def fit(batches):
        for images, text, length in batches:
            preds = model(images)
            rows, steps, classes = preds.shape
            log_probs = preds.view(steps, rows, classes).log_softmax(2)
            loss = criterion(log_probs, text, torch.full((rows,), steps), length)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    g = torch.Generator().manual_seed(5)
    data = [
        (torch.randn(8, 6, 12, generator=g), torch.randint(1, 11, (8, 3), generator=g), torch.full((8,), 3))
        for _ in range(5)
    ]
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@fault(
    "speech",
    "frames are standardised after padding, so padded frames are no longer zero and leak in through the convolution",
    thread="wenet-e2e/wenet#2806",
    check="padding_invariance",
)
def global_cmvn():
    torch.manual_seed(0)

    class Subsampled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.full((MELS,), 0.5))
            self.register_buffer("istd", torch.full((MELS,), 1.1))
            self.conv = nn.Conv1d(MELS, 16, 5, stride=2, padding=2)
            self.out = nn.Linear(16, 11)

        def forward(self, xs, lengths):
            xs = (xs - self.mean) * self.istd
            hidden = self.conv(xs.transpose(1, 2)).relu().transpose(1, 2)
            return self.out(hidden).log_softmax(-1), (lengths - 1) // 2 + 1

    model = Subsampled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            log_probs, lengths = model(batch["feats"], batch["feat_lengths"])
            loss = F.ctc_loss(
                log_probs.transpose(0, 1), batch["targets"], lengths, batch["target_lengths"], zero_infinity=True
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(utterances(seed=6), batch_size=8, collate_fn=collate)
    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader, fit=fit, padding=Padding(pad_id=0, of=("feats",))
    )
