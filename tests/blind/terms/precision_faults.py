"""Low precision by hand, in small, from public threads."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def classes(n=48, dim=16, k=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(k, dim, generator=g)
    y = torch.randint(0, k, (n,), generator=g)
    return centres[y] + 0.4 * torch.randn(n, dim, generator=g), y


def mlp(dim=16, hidden=32, k=4):
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, k))


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@fault(
    "precision",
    "t = arange(seq_len).type_as(x) makes the positions bfloat16 under autocast: behind 256 they fall together",
    thread="nkalyanv99/UNI-D2#6",
    check="precision_parity",
)
def long_context():
    class RotaryEmbedding(nn.Module):
        def __init__(self, dim, base=10000):
            super().__init__()
            self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)

        def forward(self, x):
            t = torch.arange(x.shape[-2]).type_as(x)
            freqs = torch.einsum("i,j->ij", t, self.inv_freq.type_as(x))
            emb = torch.cat((freqs, freqs), dim=-1)
            return emb.cos(), emb.sin()

    class Block(nn.Module):
        def __init__(self, vocab=32, dim=16):
            super().__init__()
            self.embed = nn.Embedding(vocab, dim)
            self.qkv = nn.Linear(dim, 3 * dim)
            self.rotary = RotaryEmbedding(dim)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, vocab)

        def forward(self, ids):
            h = self.embed(ids)
            q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
            cos, sin = self.rotary(q)
            q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
            return self.head(h + F.scaled_dot_product_attention(4 * q, 4 * k, v, is_causal=True))

    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(0)
    start = torch.randint(0, 32, (12, 1), generator=g)
    step = torch.randint(1, 4, (12, 1), generator=g)
    tokens = (start + step * torch.arange(321)) % 32
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)

    def train(batches):
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


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
    "the norm takes E[x^2] - E[x]^2 of bfloat16 activations with a large mean: the variance cancels",
    thread="AndreSlavescu/mHC.cu#6",
    check="precision_parity",
)
def channel_norm():
    class ChannelNorm(nn.Module):
        def __init__(self, dim, eps=1e-3):
            super().__init__()
            self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

        def forward(self, x):
            mean = x.mean(-1, keepdim=True)
            var = (x * x).mean(-1, keepdim=True) - mean * mean
            return (x - mean) * torch.rsqrt(var.clamp(min=0) + self.eps) * self.weight + self.bias

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(16, 32)
            nn.init.constant_(self.stem.bias, 12.0)
            self.norm = ChannelNorm(32)
            self.head = nn.Linear(32, 4)

        def forward(self, x):
            return self.head(F.gelu(self.norm(self.stem(x))))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(*classes(seed=1)), batch_size=8, shuffle=True)

    def train(batches):
        model.train()
        for x, y in batches:
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                out = model(x)
                loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


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
    "the EMA of the weights is kept in bfloat16 with decay 0.9999: its updates are rounded away",
    thread="d8ahazard/sd_dreambooth_extension#1417",
    check="parameter_precision",
)
def ema_copy():
    class EMAModel:
        def __init__(self, model, decay=0.9999, dtype=torch.bfloat16):
            self.averaged_model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
            self.decay = decay

        @torch.no_grad()
        def step(self, new_model):
            for ema_p, p in zip(self.averaged_model.parameters(), new_model.parameters(), strict=True):
                ema_p.mul_(self.decay).add_(p.to(ema_p.dtype), alpha=1 - self.decay)

    model = mlp()
    ema = EMAModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*classes(seed=4)), batch_size=8)

    def fit(batches):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.step(model)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "precision",
    "the whole model is bfloat16 and AdamW steps of 2e-5 are rounded away",
    thread="meta-pytorch/torchtune#2254",
    check="parameter_precision",
)
def finetune_recipe():
    dtype = torch.bfloat16
    model = mlp().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=False)
    loader = DataLoader(TensorDataset(*classes(seed=5)), batch_size=8)

    class Recipe:
        def __init__(self, model, optimizer):
            self._model, self._optimizer = model, optimizer

        def _loss_step(self, batch):
            x, labels = batch
            return F.cross_entropy(self._model(x.to(dtype)).float(), labels)

        def train(self, dataloader):
            for batch in dataloader:
                self._optimizer.zero_grad(set_to_none=True)
                self._loss_step(batch).backward()
                self._optimizer.step()

    recipe = Recipe(model, optimizer)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=recipe.train)


@fault(
    "precision",
    "the running variance that normalises inputs is a bfloat16 buffer with momentum 0.001, and stays at 1",
    thread="NVIDIA/Model-Optimizer#738",
    check="parameter_precision",
)
def running_normalizer():
    class RunningNorm(nn.Module):
        def __init__(self, dim, momentum=0.001):
            super().__init__()
            self.momentum = momentum
            self.register_buffer("mean", torch.zeros(dim))
            self.register_buffer("var", torch.ones(dim))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    x32 = x.float()
                    self.mean.lerp_(x32.mean(0).to(self.mean.dtype), self.momentum)
                    self.var.lerp_(x32.var(0).to(self.var.dtype), self.momentum)
            return (x - self.mean) * torch.rsqrt(self.var + 1e-5)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = RunningNorm(16).to(torch.bfloat16)
            self.net = mlp()

        def forward(self, x):
            return self.net(self.norm(x).float())

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = classes(seed=6)
    loader = DataLoader(TensorDataset(3 + 2 * x, y), batch_size=8)

    def fit(batches):
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "precision",
    "clip_grad_norm_ cuts gradients that still carry the loss scale: there is no unscale_ before it",
    thread="harubaru/waifu-diffusion#64",
    check="grad_scaler",
)
def amp_step():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    loader = DataLoader(TensorDataset(*classes(seed=7)), batch_size=8, shuffle=True)

    def step(batch):
        x, y = batch
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def train(batches):
        for batch in batches:
            step(batch)

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train, scaler=scaler)


@fault(
    "precision",
    "the loss is scaled, and optimizer.step() is called directly: gradients are 1024 times too large",
    thread="nerfstudio-project/nerfacc#307",
    check="grad_scaler",
)
def radiance_field():
    field = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-3, eps=1e-15, weight_decay=1e-5)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[500, 800], gamma=0.33)
    g = torch.Generator().manual_seed(8)
    rays = torch.rand(64, 3, generator=g)
    rgb = torch.stack([rays.prod(-1), rays[:, 0] ** 2, torch.sin(3 * rays[:, 1])], -1)
    loader = DataLoader(TensorDataset(rays, rgb), batch_size=16)

    def fit(batches):
        field.train()
        for origins, pixels in batches:
            out = field(origins)
            colour, density = out[:, :3].sigmoid(), F.softplus(out[:, 3:])
            loss = F.smooth_l1_loss(colour * (1 - torch.exp(-density)), pixels)
            optimizer.zero_grad()
            grad_scaler.scale(loss).backward()
            optimizer.step()
            scheduler.step()

    return TrainLoop(model=field, optimizer=optimizer, batches=loader, fit=fit, scheduler=scheduler)


@fault(
    "precision",
    "scaler.update() comes after each of the two steps, between gradients made at one scale and their step",
    thread="huggingface/accelerate#439",
    check="grad_scaler",
)
def two_optimizers():
    class AmpOptimizer:
        def __init__(self, optimizer, scaler):
            self.optimizer, self.scaler = optimizer, scaler

        def zero_grad(self):
            self.optimizer.zero_grad()

        def step(self):
            self.scaler.step(self.optimizer)
            self.scaler.update()

    body, heads = mlp(k=8), nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 1)})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    raw = [torch.optim.AdamW(body.parameters(), lr=1e-3), torch.optim.SGD(heads.parameters(), lr=0.05)]
    optimizers = [AmpOptimizer(o, scaler) for o in raw]
    loader = DataLoader(TensorDataset(*classes(seed=9)), batch_size=8)

    def fit(batches):
        for x, y in batches:
            for o in optimizers:
                o.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = body(x)
                loss0 = F.cross_entropy(heads["a"](h), y)
                loss1 = F.binary_cross_entropy_with_logits(heads["b"](h).squeeze(-1), (y > 1).float())
            scaler.scale(loss0 + 0.3 * loss1).backward()
            for o in optimizers:
                o.step()

    return TrainLoop(model={"body": body, "heads": heads}, optimizer=raw, batches=loader, fit=fit)


@fault(
    "precision",
    "loss_sds.backward() is not scaled, while scaler.step divides all gradients by the scale",
    thread="ashawkey/stable-dreamfusion#158",
    check="grad_scaler",
)
def sds_trainer():
    model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 16))
    guide = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)).requires_grad_(False).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    x, _ = classes(dim=8, seed=10)
    loader = DataLoader(TensorDataset(x, torch.tanh(x).repeat(1, 2)), batch_size=8)

    class Trainer:
        def train_step(self, x, target):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                latents = model(x)
                with torch.no_grad():
                    grad = guide(latents.detach()) - latents.detach()
                loss_sds = 0.1 * ((latents + grad).detach() - latents).float().square().mean()
                loss = F.mse_loss(latents, target)
            return loss, loss_sds

        def train(self, loader):
            for x, target in loader:
                optimizer.zero_grad()
                loss, loss_sds = self.train_step(x, target)
                loss_sds.backward(retain_graph=True)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    return TrainLoop(
        model={"model": model, "guide": guide},
        optimizer=optimizer,
        batches=loader,
        fit=lambda batches: Trainer().train(batches),
        frozen=("guide.",),
    )


@fault(
    "precision",
    "the pairwise cost is summed over 2048 points in float16 (pos @ labels.T) and divided by their number after it",
    thread="huggingface/transformers#25938",
    check="precision_parity",
)
def cost_matrix():
    class Matcher(nn.Module):
        def __init__(self, dim=16, points=2048):
            super().__init__()
            self.masks = nn.Linear(dim, points)
            self.queries = nn.Linear(dim, 4)
            nn.init.constant_(self.masks.bias, -40.0)

        def forward(self, x):
            return self.masks(x), self.queries(x)

    model = Matcher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    x, y = classes(seed=11)
    g = torch.Generator().manual_seed(11)
    templates = (torch.rand(4, 2048, generator=g) < 0.9).float()
    loader = DataLoader(TensorDataset(x, y), batch_size=8)

    def pair_wise_cost(inputs, labels):
        pos, neg = F.softplus(-inputs), F.softplus(inputs)
        loss_pos = pos @ labels.T
        loss_neg = neg @ (1 - labels).T
        return (loss_pos + loss_neg) / inputs.shape[1]

    def fit(batches):
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.float16):
                masks, scores = model(x)
                cost = pair_wise_cost(masks, templates)
                loss = F.cross_entropy(-cost, y) + F.cross_entropy(scores, y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit, scaler=scaler)


class WeightAverage:
    def __init__(self, model, decay=0.9):
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.decay, self.collected = decay, None

    @torch.no_grad()
    def update(self, params):
        for s, p in zip(self.shadow, params, strict=True):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, params):
        for s, p in zip(self.shadow, params, strict=True):
            p.copy_(s)

    def store(self, params):
        self.collected = [p.detach().clone() for p in params]


def averaged_training(model, optimizer, ema, batches):
    model.train()
    for x, y in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model.parameters())


@fault(
    "precision",
    "validation stores the weights and copies the average into the model, and restore() is never called",
    thread="PKU-YuanGroup/Open-Sora-Plan#186",
    check="evaluation_is_pure",
)
def validated_with_ema():
    model = mlp()
    ema = WeightAverage(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, y = classes(seed=12)

    @torch.no_grad()
    def log_validation():
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
        model.eval()
        accuracy = (model(x).argmax(-1) == y).float().mean().item()
        model.train()
        return accuracy

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(x, y), batch_size=8),
        fit=lambda batches: averaged_training(model, optimizer, ema, batches),
        evaluate=log_validation,
    )


@fault(
    "precision",
    "cached_weights = model.state_dict() holds references, which load_state_dict of the average overwrites in place",
    thread="aqlaboratory/openfold#90",
    check="evaluation_is_pure",
)
def ema_wrapper():
    class Wrapper:
        def __init__(self):
            self.model = mlp()
            self.ema = WeightAverage(self.model)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
            self.cached_weights = None

        def ema_state(self):
            return dict(zip(self.model.state_dict(), self.ema.shadow, strict=True))

        @torch.no_grad()
        def validation(self, x, y):
            self.cached_weights = self.model.state_dict()
            self.model.load_state_dict(self.ema_state())
            loss = F.cross_entropy(self.model(x), y).item()
            self.model.load_state_dict(self.cached_weights)
            self.cached_weights = None
            return loss

    wrapper = Wrapper()
    x, y = classes(seed=13)
    return TrainLoop(
        model=wrapper.model,
        optimizer=wrapper.optimizer,
        batches=DataLoader(TensorDataset(x, y), batch_size=8),
        fit=lambda batches: averaged_training(wrapper.model, wrapper.optimizer, wrapper.ema, batches),
        evaluate=lambda: wrapper.validation(x, y),
    )


@fault(
    "precision",
    "the float32 copies are made anew of the bfloat16 weights in each step, so that what rounding took is lost",
    thread="facebookresearch/fairseq#404",
    check="parameter_precision",
)
def memory_efficient_fp16():
    class MemoryEfficientOptimizer:
        def __init__(self, params, lr):
            self.params = list(params)
            self.fp32 = [nn.Parameter(p.detach().float()) for p in self.params]
            self.wrapped = torch.optim.Adam(self.fp32, lr=lr)

        def zero_grad(self):
            for p in self.params:
                p.grad = None

        @torch.no_grad()
        def step(self):
            for p, master in zip(self.params, self.fp32, strict=True):
                master.copy_(p)
                master.grad = p.grad.float()
            self.wrapped.step()
            for p, master in zip(self.params, self.fp32, strict=True):
                p.copy_(master)
                master.grad = None

    model = mlp().bfloat16()
    optimizer = MemoryEfficientOptimizer(model.parameters(), lr=5e-5)
    loader = DataLoader(TensorDataset(*classes(seed=14)), batch_size=8)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x.bfloat16()).float(), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer.wrapped, batches=loader, fit=train)


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
