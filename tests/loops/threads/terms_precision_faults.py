"""Low precision by hand, in small, from public threads."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.loops.from_threads import fault


def classes(n=48, dim=16, k=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(k, dim, generator=g)
    y = torch.randint(0, k, (n,), generator=g)
    return centres[y] + 0.4 * torch.randn(n, dim, generator=g), y


def mlp(dim=16, hidden=32, k=4):
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, k))


def sinusoidal_embedding_1d(dim, position):
    freqs = torch.pow(10000, -torch.arange(dim // 2, dtype=torch.float32) / (dim // 2))
    sinusoid = torch.outer(position.float(), freqs)
    return torch.cat([sinusoid.cos(), sinusoid.sin()], 1)


@fault(
    "precision",
    "timestep is cast to bfloat16 (steps of 4 near 1000) before the sinusoidal embedding",
    thread="modelscope/DiffSynth-Studio#1025",
    check="precision_parity",
)
def dit_training():
    class DiT(nn.Module):
        def __init__(self, dim=8, freq=32):
            super().__init__()
            self.freq = freq
            self.time_embedding = nn.Sequential(nn.Linear(freq, 32), nn.SiLU(), nn.Linear(32, 32))
            self.inp, self.mid, self.out = nn.Linear(dim, 32), nn.Linear(32, 32), nn.Linear(32, dim)

        def forward(self, x, timestep):
            t = self.time_embedding(sinusoidal_embedding_1d(self.freq, timestep))
            return self.out(F.silu(self.mid(F.silu(self.inp(x) + t))))

    model = DiT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dtype = torch.bfloat16
    loader = DataLoader(TensorDataset(classes(dim=8)[0]), batch_size=8)

    def training_loss(x0):
        timestep = torch.randint(0, 1000, (len(x0),))
        sigma = (timestep / 1000)[:, None]
        noise = torch.randn_like(x0)
        with torch.autocast("cpu", dtype=dtype):
            pred = model((1 - sigma) * x0 + sigma * noise, timestep.to(dtype))
        return F.mse_loss(pred.float(), noise - x0)

    def fit(batches):
        for (x0,) in batches:
            optimizer.zero_grad()
            training_loss(x0).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "precision",
    "the cumulative decay is kept in bfloat16, and differences of its entries are exponentiated",
    thread="state-spaces/mamba#923",
    check="precision_parity",
)
def gated_scan():
    class Mixer(nn.Module):
        def __init__(self, vocab=16, dim=16):
            super().__init__()
            self.embed = nn.Embedding(vocab, dim)
            self.in_proj = nn.Linear(dim, 2 * dim)
            self.dt = nn.Linear(dim, 1)
            self.A_log = nn.Parameter(torch.tensor(0.0))
            self.out = nn.Linear(dim, vocab)

        def forward(self, ids):
            h = self.embed(ids)
            x, z = self.in_proj(h).chunk(2, -1)
            dt = F.softplus(self.dt(h)).squeeze(-1)
            cs = torch.cumsum(dt * -torch.exp(self.A_log), 1).to(x.dtype)
            weights = torch.exp(cs[:, -1:] - cs) * dt
            state = torch.einsum("bt,btd->bd", weights.to(x.dtype), x)
            return self.out(state * F.silu(z[:, -1]))

    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(3)
    tokens = (torch.randint(0, 16, (24, 1), generator=g) + 3 * torch.arange(161)) % 16
    loader = DataLoader(TensorDataset(tokens), batch_size=6)

    class Trainer:
        def __init__(self, model, optimizer, dtype=torch.bfloat16):
            self.model, self.optimizer, self.dtype = model, optimizer, dtype

        def training_step(self, batch):
            (ids,) = batch
            with torch.autocast("cpu", dtype=self.dtype):
                logits = self.model(ids[:, :-1])
            return F.cross_entropy(logits.float(), ids[:, -1])

        def fit(self, batches):
            for batch in batches:
                self.optimizer.zero_grad()
                self.training_step(batch).backward()
                self.optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=lambda b: Trainer(model, optimizer).fit(b))


@fault(
    "precision",
    "master_params are cloned before the checkpoint is loaded, and the first step writes the old values over it",
    thread="NVIDIA/apex#42",
    check="weights_are_read",
)
def resumed_fp16():
    model = mlp().bfloat16()
    master_params = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = torch.optim.SGD(master_params, lr=0.02, momentum=0.9)
    checkpoint = {"state_dict": {k: v.float() * 1.5 for k, v in mlp().state_dict().items()}}
    model.load_state_dict(checkpoint["state_dict"])
    loader = DataLoader(TensorDataset(*classes(seed=15)), batch_size=8)

    def fit(batches):
        for x, y in batches:
            loss = 128.0 * F.cross_entropy(model(x.bfloat16()).float(), y)
            model.zero_grad()
            loss.backward()
            for master, p in zip(master_params, model.parameters(), strict=True):
                master.grad = p.grad.float() / 128.0
            optimizer.step()
            with torch.no_grad():
                for master, p in zip(master_params, model.parameters(), strict=True):
                    p.copy_(master)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
