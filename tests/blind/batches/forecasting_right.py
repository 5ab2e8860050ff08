"""Right loops about forecasting that look odd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def series(rows, length, channels=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand(rows, 1, channels, generator=generator) * 6
    level = torch.rand(rows, 1, channels, generator=generator) * 4 + 1
    time = torch.arange(length).view(1, -1, 1) * 0.5
    return level * (1.5 + torch.sin(time + phase)) + 0.1 * torch.randn(rows, length, channels, generator=generator)


@right(
    "forecasting",
    "missing values, zeros in the data, are left out of the loss by a mask whose mean is brought to 1 "
    "(masked MAE of DCRNN)",
    thread="liyaguang/DCRNN#37",
)
def masked_mae():
    torch.manual_seed(0)

    def masked_mae_loss(prediction, target):
        mask = target.ne(0).to(prediction.dtype)
        mask = mask / mask.mean().clamp(min=1e-6)
        return ((prediction - target).abs() * mask).mean()

    class TrafficNet(nn.Module):
        def __init__(self, sensors=5, hidden=24):
            super().__init__()
            self.mix = nn.Linear(sensors, hidden)
            self.rnn, self.out = nn.GRU(hidden, hidden, batch_first=True), nn.Linear(hidden, sensors)

        def forward(self, x, horizon=3):
            encoded, state = self.rnn(self.mix(x))
            step, outputs = self.out(encoded[:, -1:]), []
            for _ in range(horizon):
                hidden, state = self.rnn(self.mix(step), state)
                step = self.out(hidden)
                outputs.append(step)
            return torch.cat(outputs, 1)

    values = series(40, 15, channels=5, seed=1)
    values = values * (torch.rand(values.shape, generator=torch.Generator().manual_seed(2)) > 0.15)
    loader = DataLoader(TensorDataset(values[:, :12], values[:, 12:]), batch_size=8)
    model = TrafficNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            masked_mae_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@right(
    "forecasting",
    "DeepAR: each series is scaled by the mean of its own observed history, lagged targets are inputs "
    "(teacher forcing)",
    thread="awslabs/gluonts#1235",
)
def deep_ar():
    torch.manual_seed(0)

    class DeepAR(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.loc, self.scale = nn.LSTM(2, 20, batch_first=True), nn.Linear(20, 1), nn.Linear(20, 1)

        def forward(self, past_target, past_observed, future_target):
            weight = past_observed.sum(1, keepdim=True).clamp(min=1)
            scale = ((past_target.abs() * past_observed).sum(1, keepdim=True) / weight).clamp(min=1e-3)
            target = torch.cat([past_target, future_target], 1) / scale
            observed = F.pad(past_observed, (0, future_target.shape[1]), value=1.0)
            inputs = torch.stack([target[:, :-1] * observed[:, :-1], observed[:, :-1]], -1)
            hidden, _ = self.rnn(inputs)
            normal = torch.distributions.Normal(
                self.loc(hidden).squeeze(-1), F.softplus(self.scale(hidden)).squeeze(-1) + 1e-3
            )
            nll = -normal.log_prob(target[:, 1:])
            return (nll * observed[:, 1:]).sum() / observed[:, 1:].sum()

    values = series(40, 16, seed=3).squeeze(-1)
    observed = (torch.rand(40, 12, generator=torch.Generator().manual_seed(4)) > 0.2).float()
    data = TensorDataset(values[:, :12] * observed, observed, values[:, 12:])
    model = DeepAR()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for batch in batches:
            loss = model(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=8), fit=fit)


@right(
    "forecasting",
    "RevIN: mean and deviation of each window over time, detached, taken off before the network and put back behind it",
    thread="ts-kim/RevIN#10",
)
def reversible_instance_norm():
    torch.manual_seed(0)

    class RevIN(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

        def forward(self, x, mode):
            if mode == "norm":
                self.mean = x.mean(dim=1, keepdim=True).detach()
                self.stdev = torch.sqrt(x.var(dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
                return (x - self.mean) / self.stdev * self.weight + self.bias
            return (x - self.bias) / (self.weight + 1e-10) * self.stdev + self.mean

    class Forecaster(nn.Module):
        def __init__(self, context=16, horizon=4, channels=3):
            super().__init__()
            self.revin, self.linear = RevIN(channels), nn.Linear(context, horizon)

        def forward(self, x):
            x = self.revin(x, "norm")
            return self.revin(self.linear(x.transpose(1, 2)).transpose(1, 2), "denorm")

    values = series(36, 20, channels=3, seed=5)
    loader = DataLoader(TensorDataset(values[:, :16], values[:, 16:]), batch_size=6, shuffle=True)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit, rows_interact=False)


@right(
    "forecasting",
    "windows of one series overlap, so rows of a batch share values; the target of one row is an input of the next",
    thread="pytorch/tutorials#719",
)
def sliding_windows():
    torch.manual_seed(0)

    class Windows(Dataset):
        def __init__(self, values, context, horizon):
            self.values, self.context, self.horizon = values, context, horizon

        def __len__(self):
            return len(self.values) - self.context - self.horizon + 1

        def __getitem__(self, index):
            middle = index + self.context
            return self.values[index:middle], self.values[middle : middle + self.horizon, 0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = nn.LSTM(2, 16, batch_first=True), nn.Linear(16, 2)

        def forward(self, x):
            return self.out(self.lstm(x)[0][:, -1])

    data = Windows(series(1, 60, channels=2, seed=6)[0], context=10, horizon=2)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.huber_loss(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=7), fit=train)


@right(
    "forecasting",
    "the decoder gets the targets shifted by one, the last known value first, under a causal mask; the "
    "history it sees whole",
    thread="jadore801120/attention-is-all-you-need-pytorch#123",
)
def shifted_decoder():
    torch.manual_seed(0)

    class Forecaster(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.past, self.future = nn.Linear(1, dim), nn.Linear(1, dim)
            self.places = nn.Parameter(torch.randn(32, dim) * 0.1)
            self.net = nn.Transformer(dim, 2, 1, 1, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(dim, 1)

        def forward(self, past, shifted):
            length = shifted.shape[1]
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            past = self.past(past) + self.places[: past.shape[1]]
            return self.head(self.net(past, self.future(shifted) + self.places[:length], tgt_mask=future))

    values = series(40, 20, seed=7)
    loader = DataLoader(TensorDataset(values[:, :14], values[:, 14:]), batch_size=8)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for past, future in batches:
            shifted = torch.cat([past[:, -1:], future[:, :-1]], 1)
            loss = F.mse_loss(model(past, shifted), future)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "forecasting",
    "SAITS: the loss reads held-out values at the artificially missing places and observed ones elsewhere",
    thread="WenjieDu/SAITS#7",
)
def imputation():
    torch.manual_seed(0)

    def masked_mae(prediction, target, mask):
        return ((prediction - target).abs() * mask).sum() / (mask.sum() + 1e-12)

    class Imputer(nn.Module):
        def __init__(self, features=4, dim=16):
            super().__init__()
            self.embed = nn.Linear(2 * features, dim)
            self.layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
            self.reduce = nn.Linear(dim, features)

        def forward(self, x, missing_mask):
            return self.reduce(self.layer(self.embed(torch.cat([x, missing_mask], 2))))

    generator = torch.Generator().manual_seed(8)
    data = []
    for i in range(5):
        complete = series(8, 12, channels=4, seed=10 + i)
        observed = (torch.rand(complete.shape, generator=generator) > 0.1).float()
        held_out = (torch.rand(complete.shape, generator=generator) > 0.8).float() * observed
        missing_mask = observed - held_out
        batch = {"X": complete * missing_mask, "missing_mask": missing_mask}
        data.append({**batch, "X_holdout": complete * observed, "indicating_mask": held_out})
    model = Imputer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for b in batches:
            imputed = model(b["X"], b["missing_mask"])
            loss = masked_mae(imputed, b["X"], b["missing_mask"])
            loss = loss + masked_mae(imputed, b["X_holdout"], b["indicating_mask"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit, ordered=False)


@right(
    "forecasting",
    "a temporal convolution net padded on the left only; every position predicts the next value, the first steps too",
    thread="oliverguhr/transformer-time-series-prediction#3",
)
def causal_convolutions():
    torch.manual_seed(0)

    class TCN(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.convs = nn.ModuleList(
                nn.utils.parametrizations.weight_norm(nn.Conv1d(1 if d == 1 else dim, dim, 3, dilation=d))
                for d in (1, 2, 4)
            )
            self.out = nn.Conv1d(dim, 1, 1)

        def forward(self, x):
            x = x.transpose(1, 2)
            for conv in self.convs:
                y = F.gelu(conv(F.pad(x, (2 * conv.dilation[0], 0))))
                x = y + x if x.shape == y.shape else y
            return self.out(x).transpose(1, 2)

    values = series(40, 25, seed=20)
    loader = DataLoader(TensorDataset(values), batch_size=8)
    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def fit(batches):
        for (x,) in batches:
            loss = F.mse_loss(model(x[:, :-1]), x[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@right(
    "forecasting",
    "sequences come time first, (steps, rows, features), as the LSTM takes them; the last step is out[-1]",
    thread="https://errorhandle.ai/long-processing-time-for-javascript-when-generating-pdf",
)
def time_first():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.linear = nn.LSTM(3, 16), nn.Linear(16, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.linear(out[-1])

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    values = [series(8, 13, channels=3, seed=30 + i).transpose(0, 1) for i in range(5)]

    def train(batches):
        for steps in batches:
            optimizer.zero_grad()
            F.mse_loss(model(steps[:-1]), steps[-1, :, :1]).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=values, fit=train, batch_dim=1)


@right(
    "forecasting",
    "N-BEATS: blocks subtract their backcast from the input and add forecasts; each window is divided by "
    "its own maximum",
    thread="awslabs/gluonts#1235",
)
def residual_blocks():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, context, horizon):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(context, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
            self.backcast, self.forecast = nn.Linear(24, context, bias=False), nn.Linear(24, horizon, bias=False)

        def forward(self, x):
            hidden = self.trunk(x)
            return self.backcast(hidden), self.forecast(hidden)

    class NBeats(nn.Module):
        def __init__(self, context=12, horizon=4, blocks=2):
            super().__init__()
            self.blocks = nn.ModuleList(Block(context, horizon) for _ in range(blocks - 1))
            self.last = nn.Sequential(nn.Linear(context, 24), nn.ReLU(), nn.Linear(24, horizon))

        def forward(self, x, mask):
            level = (x * mask).abs().amax(1, keepdim=True).clamp(min=1e-3)
            residual, total = x * mask / level, 0.0
            for block in self.blocks:
                backcast, forecast = block(residual)
                residual, total = (residual - backcast) * mask, total + forecast
            return (total + self.last(residual)) * level

    values = series(40, 16, seed=40).squeeze(-1)
    start = torch.randint(0, 6, (40, 1), generator=torch.Generator().manual_seed(41))
    mask = (torch.arange(12) >= start).float()
    loader = DataLoader(TensorDataset(values[:, :12] * mask, mask, values[:, 12:]), batch_size=8)
    model = NBeats()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def smape(forecast, target):
        return 200 * ((forecast - target).abs() / (forecast.abs().detach() + target.abs())).mean()

    def fit(batches):
        for x, keep, y in batches:
            optimizer.zero_grad()
            smape(model(x, keep), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
