"""Faulty loops about forecasting: windows, missing values, scales, teacher forcing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def series(rows, length, channels=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand(rows, 1, channels, generator=generator) * 6
    level = torch.rand(rows, 1, channels, generator=generator) * 4 + 1
    time = torch.arange(length).view(1, -1, 1) * 0.5
    return level * (1.5 + torch.sin(time + phase)) + 0.1 * torch.randn(rows, length, channels, generator=generator)


@fault(
    "forecasting",
    "future_observed_values is handed to the model and not used: missing targets, filled with 0, count in the loss",
    thread="awslabs/gluonts#2893",
    check="input_dependence",
)
def probabilistic_transformer():
    torch.manual_seed(0)

    class Forecaster(nn.Module):
        def __init__(self, context=12, horizon=4):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2 * context, 32), nn.GELU())
            self.mean, self.scale = nn.Linear(32, horizon), nn.Linear(32, horizon)

        def forward(self, past_target, past_observed_values, future_target, future_observed_values):
            hidden = self.net(torch.cat([past_target * past_observed_values, past_observed_values], -1))
            distr = torch.distributions.Normal(self.mean(hidden), F.softplus(self.scale(hidden)) + 1e-3)
            return -distr.log_prob(future_target).mean()

    values = series(40, 16).squeeze(-1)
    observed = (torch.rand(values.shape, generator=torch.Generator().manual_seed(1)) > 0.2).float()
    values = values * observed
    data = [
        {
            "past_target": values[i : i + 8, :12],
            "past_observed_values": observed[i : i + 8, :12],
            "future_target": values[i : i + 8, 12:],
            "future_observed_values": observed[i : i + 8, 12:],
        }
        for i in range(0, 40, 8)
    ]
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@fault(
    "forecasting",
    "the instance norm takes mean and std over dim=0, the rows of the batch, in place of the time axis",
    thread="ts-kim/RevIN#3",
    check="batch_independence",
)
def reversible_norm():
    torch.manual_seed(0)

    class RevIN(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

        def norm(self, x):
            self.mean = x.mean(dim=0, keepdim=True).detach()
            self.std = torch.sqrt(x.var(dim=0, keepdim=True, unbiased=False) + 1e-5).detach()
            return (x - self.mean) / self.std * self.weight + self.bias

        def denorm(self, y):
            y = (y - self.bias) / self.weight
            return y * self.std[:, -1:] + self.mean[:, -1:]

    class DLinear(nn.Module):
        def __init__(self, context=16, horizon=4, channels=3):
            super().__init__()
            self.revin = RevIN(channels)
            self.mix = nn.Sequential(nn.Linear(context, 24), nn.Tanh(), nn.Linear(24, horizon))

        def forward(self, x):
            x = self.revin.norm(x)
            return self.revin.denorm(self.mix(x.transpose(1, 2)).transpose(1, 2))

    values = series(36, 20, channels=3, seed=2)
    loader = DataLoader(TensorDataset(values[:, :16], values[:, 16:]), batch_size=6)
    model = DLinear()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, rows_interact=False)


@fault(
    "forecasting",
    "the decoder is fed the targets of the same steps without a shift and without a causal mask",
    thread="LongxingTan/Time-series-prediction#32",
    check="causality",
)
def time_series_decoder():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.project = nn.Linear(1, dim)
            self.positions = nn.Parameter(torch.randn(1, 32, dim) * 0.1)
            layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.decoder = nn.TransformerEncoder(layer, 1)
            self.head = nn.Linear(dim, 1)

        def forward(self, x):
            h = self.project(x) + self.positions[:, : x.shape[1]]
            return self.head(self.decoder(h))

    values = series(40, 21, seed=3)
    loader = DataLoader(TensorDataset(values[:, :-1], values[:, 1:]), batch_size=8)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "forecasting",
    "the encoder's last state is taken after the padded steps although encoder_lengths are given",
    thread="sktime/pytorch-forecasting#893",
    check="padding_invariance",
)
def variable_encoder_length():
    torch.manual_seed(0)

    class EncoderDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.LSTM(2, 16, batch_first=True)
            self.decoder = nn.LSTM(1, 16, batch_first=True)
            self.output = nn.Linear(16, 3)

        def forward(self, x):
            _, state = self.encoder(x["encoder_cont"])
            hidden, _ = self.decoder(x["decoder_cont"], state)
            return self.output(hidden)

    def quantile_loss(prediction, target, quantiles=(0.1, 0.5, 0.9)):
        errors = target.unsqueeze(-1) - prediction
        q = prediction.new_tensor(quantiles)
        return torch.maximum((q - 1) * errors, q * errors).mean()

    generator = torch.Generator().manual_seed(4)
    data = []
    for _ in range(5):
        lengths = torch.randint(5, 15, (8,), generator=generator)
        lengths[0] = 14
        encoder = torch.randn(8, 14, 2, generator=generator)
        encoder = encoder * (torch.arange(14) < lengths[:, None]).unsqueeze(-1)
        x = {
            "encoder_cont": encoder,
            "encoder_lengths": lengths,
            "decoder_cont": torch.randn(8, 4, 1, generator=generator),
        }
        data.append((x, torch.randn(8, 4, generator=generator)))
    model = EncoderDecoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for x, y in batches:
            loss = quantile_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@fault(
    "forecasting",
    "the scale of a series is the mean of |x| over the whole window: padded history, zeros at its left, shrinks it",
    thread="awslabs/gluonts#1235",
    check="padding_invariance",
)
def mean_scaler():
    torch.manual_seed(0)

    class DeepAR(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(1, 16, batch_first=True)
            self.loc = nn.Linear(16, 1)

        def forward(self, past, observed):
            scale = past.abs().mean(dim=1, keepdim=True).clamp(min=1e-3)
            inputs = (past / scale).unsqueeze(-1)
            hidden = past.new_zeros(1, len(past), 16)
            states = []
            for t in range(past.shape[1]):
                _, new = self.rnn(inputs[:, t : t + 1], hidden)
                on = observed[:, t].view(1, -1, 1)
                hidden = on * new + (1 - on) * hidden
                states.append(hidden[0])
            return self.loc(torch.stack(states, 1)).squeeze(-1) * scale

    values = series(40, 15, seed=5).squeeze(-1)
    starts = torch.randint(0, 7, (40, 1), generator=torch.Generator().manual_seed(6))
    starts[::8] = 0
    observed = (torch.arange(15) >= starts).float()
    data = TensorDataset(values * observed, observed)
    model = DeepAR()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for target, mask in batches:
            prediction = model(target[:, :-1], mask[:, :-1])
            weight = mask[:, 1:] * mask[:, :-1]
            loss = ((prediction - target[:, 1:]).abs() * weight).sum() / weight.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8), fit=fit)


@fault(
    "forecasting",
    "nn.LSTM without batch_first gets windows (rows, steps, features): it runs over the rows",
    thread="https://github.com/yoshi-cow/study_pytorch_v1",
    check="batch_independence",
)
def stock_windows():
    torch.manual_seed(0)

    class LSTMModel(nn.Module):
        def __init__(self, input_size=3, hidden_size=16, layers=1):
            super().__init__()
            self.hidden_size, self.layers = hidden_size, layers
            self.lstm = nn.LSTM(input_size, hidden_size, layers)
            self.linear = nn.Linear(hidden_size, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.linear(out[:, -1, :])

    values = series(48, 11, channels=3, seed=7)
    loader = DataLoader(TensorDataset(values[:, :10], values[:, 10, :1]), batch_size=12)
    model = LSTMModel()
    loss_function = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for window, target in batches:
            optimizer.zero_grad()
            loss = loss_function(model(window), target)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)
