"""Low precision in small that is right, and looks odd."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def classes(n=48, dim=16, k=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(k, dim, generator=g)
    y = torch.randint(0, k, (n,), generator=g)
    return centres[y] + 0.4 * torch.randn(n, dim, generator=g), y


def mlp(dim=16, hidden=32, k=4):
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, k))


def loader_of(*tensors, batch_size=8, shuffle=False):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=shuffle)


@right(
    "precision",
    "the scale begins too high, so that first steps are skipped, and the schedule moves only where a step was made",
    thread="ShiqiYu/OpenGait#147",
)
def skipped_first_steps():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scale <= scaler.get_scale():
                scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        batches=loader_of(*classes(seed=0), shuffle=True),
        fit=fit,
    )


@right(
    "precision",
    "one scaler serves generator and discriminator, with one update at the end of both steps",
    thread="neosr-project/neosr#50",
)
def shared_scaler():
    gen = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    disc = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.99))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    x, _ = classes(seed=1)

    def optimize_parameters(real, z):
        disc.requires_grad_(False)
        opt_g.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fake = gen(z)
            l_g = F.softplus(-disc(fake)).mean() + F.l1_loss(fake, real)
        scaler.scale(l_g).backward()
        scaler.step(opt_g)
        disc.requires_grad_(True)
        opt_d.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            l_d = F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean()
        scaler.scale(l_d).backward()
        scaler.step(opt_d)
        scaler.update()

    def fit(batches):
        for real, z in batches:
            optimize_parameters(real, z)

    return TrainLoop(
        model={"net_g": gen, "net_d": disc}, optimizer=[opt_g, opt_d], batches=loader_of(x, x[:, :8]), fit=fit
    )


@right(
    "precision",
    "the scaler is there and disabled, since bfloat16 needs none; unscale_ and step are then plain calls",
    thread="karpathy/nanoGPT#106",
)
def disabled_scaler():
    class CharModel(nn.Module):
        def __init__(self, vocab=16, dim=24):
            super().__init__()
            self.wte = nn.Embedding(vocab, dim)
            self.rnn = nn.GRU(dim, dim, batch_first=True)
            self.lm_head = nn.Linear(dim, vocab, bias=False)
            self.lm_head.weight = self.wte.weight
            nn.init.normal_(self.wte.weight, std=0.02)

        def forward(self, idx, targets):
            logits = self.lm_head(self.rnn(self.wte(idx))[0])
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    model = CharModel()
    dtype = "bfloat16"
    ctx = torch.amp.autocast("cpu", dtype={"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype])
    scaler = torch.amp.GradScaler("cpu", enabled=(dtype == "float16"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    g = torch.Generator().manual_seed(2)
    tokens = (torch.randint(0, 16, (24, 1), generator=g) + 3 * torch.arange(17)) % 16

    def train(batches, grad_clip=1.0):
        for x, y in batches:
            with ctx:
                _, loss = model(x, y)
            scaler.scale(loss).backward()
            if grad_clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

    return TrainLoop(
        model=model, optimizer=optimizer, batches=loader_of(tokens[:, :-1], tokens[:, 1:], batch_size=6), fit=train
    )


@right(
    "precision",
    "the gradient penalty is taken of scaled gradients times 1 / scale, and the sum is scaled again",
    thread="pytorch/pytorch#26512",
)
def scaled_gradient_penalty():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            inv_scale = 1.0 / scaler.get_scale()
            grads = [p * inv_scale for p in scaled]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                grad_norm = torch.sqrt(sum(g.pow(2).sum() for g in grads) + 1e-12)
                loss = loss + 0.01 * grad_norm
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(*classes(seed=3)), fit=fit)


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


@right(
    "precision",
    "phases are float32 even under autocast; cosines, sines and normed states go back to bfloat16 at the end",
    thread="Modalities/modalities#462",
)
def rotary_island():
    class Rotary(nn.Module):
        def __init__(self, dim, base=10000):
            super().__init__()
            inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
            self.register_buffer("inv_freq", inv_freq, persistent=False)

        @torch.no_grad()
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                t = torch.arange(x.shape[-2], dtype=torch.float32)
                emb = torch.outer(t, self.inv_freq.float()).repeat(1, 2)
                return emb.cos().to(x.dtype), emb.sin().to(x.dtype)

    def rotate_half(x):
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)

    class Decoder(nn.Module):
        def __init__(self, vocab=24, dim=16):
            super().__init__()
            self.embed = nn.Embedding(vocab, dim)
            self.norm, self.final = RMSNorm(dim), RMSNorm(dim)
            self.qkv, self.rotary = nn.Linear(dim, 3 * dim, bias=False), Rotary(dim)
            self.head = nn.Linear(dim, vocab, bias=False)

        def forward(self, ids):
            h = self.embed(ids)
            q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
            cos, sin = self.rotary(q)
            q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
            return self.head(self.final(h + F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(4)
    tokens = (torch.randint(0, 24, (16, 1), generator=g) + 5 * torch.arange(97)) % 24

    def fit(batches):
        for (ids,) in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(tokens, batch_size=4), fit=fit)


def copy_stochastic_(target, source):
    result = torch.randint_like(source, dtype=torch.int32, low=0, high=1 << 16)
    result.add_(source.view(dtype=torch.int32))
    result.bitwise_and_(-65536)
    target.copy_(result.view(dtype=torch.float32))


class AdamWBF16(torch.optim.Optimizer):
    """Weights in bfloat16: what rounding takes is kept in a second tensor, or drawn."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, kahan=False):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, kahan=kahan))  # noqa: C408

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.float()
                if not state:
                    state["step"] = 0
                    state["m"], state["v"] = torch.zeros_like(grad), torch.zeros_like(grad)
                    if group["kahan"]:
                        state["shift"] = torch.zeros_like(grad)
                state["step"] += 1
                state["m"].lerp_(grad, 1 - b1)
                state["v"].lerp_(grad.square(), 1 - b2)
                m = state["m"] / (1 - b1 ** state["step"])
                v = state["v"] / (1 - b2 ** state["step"])
                update = -group["lr"] * (m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p.float())
                if group["kahan"]:
                    want = p.float() + (state["shift"] + update)
                    p.copy_(want)
                    state["shift"] = want - p.float()
                else:
                    copy_stochastic_(p, p.float() + update)


def train_bf16(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


@right(
    "precision",
    "weights are bfloat16 and steps small, and the result of each step is rounded up or down by chance",
    thread="pytorch/pytorch#120376",
)
def stochastic_rounding():
    model = mlp().bfloat16()
    optimizer = AdamWBF16(model.parameters(), lr=3e-4)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader_of(*classes(seed=5)),
        fit=lambda batches: train_bf16(model, optimizer, batches),
    )


@right(
    "precision",
    "weights are bfloat16, and what rounding takes from an update is kept and added to the next (Kahan)",
    thread="pytorch/torchdistx#52",
)
def kahan_weights():
    model = mlp().bfloat16()
    optimizer = AdamWBF16(model.parameters(), lr=3e-4, weight_decay=0.01, kahan=True)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader_of(*classes(seed=6)),
        fit=lambda batches: train_bf16(model, optimizer, batches),
    )


@right(
    "precision",
    "the optimizer holds float32 copies; the model's own bfloat16 weights are written from them after each step",
    thread="openai/guided-diffusion, fp16_util.py MixedPrecisionTrainer",
)
def master_params():
    class MixedPrecisionTrainer:
        def __init__(self, model, lg_loss_scale=7.0):
            self.model = model
            self.model_params = list(model.parameters())
            self.master_params = [nn.Parameter(p.detach().float().clone()) for p in self.model_params]
            self.lg_loss_scale = lg_loss_scale

        def zero_grad(self):
            for p in self.model_params:
                p.grad = None

        def backward(self, loss):
            (loss * 2**self.lg_loss_scale).backward()

        def optimize(self, opt):
            for master, p in zip(self.master_params, self.model_params, strict=True):
                master.grad = p.grad.float() * (1.0 / 2**self.lg_loss_scale)
            opt.step()
            with torch.no_grad():
                for master, p in zip(self.master_params, self.model_params, strict=True):
                    p.copy_(master)
                    master.grad = None

    model = mlp().bfloat16()
    mp_trainer = MixedPrecisionTrainer(model)
    opt = torch.optim.AdamW(mp_trainer.master_params, lr=1e-3)

    def run_loop(batches):
        for x, y in batches:
            mp_trainer.zero_grad()
            mp_trainer.backward(F.cross_entropy(model(x.bfloat16()).float(), y))
            mp_trainer.optimize(opt)

    return TrainLoop(model=model, optimizer=opt, batches=loader_of(*classes(seed=7)), fit=run_loop)


@right(
    "precision",
    "the loss is multiplied by 1024 and the gradients are divided by 1024 before the step",
    thread="lliuz/ARFlow#11",
)
def static_scale():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            scaled_loss = 1024.0 * F.cross_entropy(model(x), y)
            scaled_loss.backward()
            for param in [p for p in model.parameters() if p.requires_grad]:
                param.grad.data.mul_(1.0 / 1024)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(*classes(seed=8)), fit=fit)


@right(
    "precision",
    "the average is float32, its decay grows with the step, and the trained weights run under bfloat16 autocast",
    thread="lucidrains/ema-pytorch#36",
)
def ema_warmup():
    class EMA:
        def __init__(self, model, beta=0.999):
            self.ema_model = copy.deepcopy(model).float().eval().requires_grad_(False)
            self.model, self.beta, self.step = model, beta, 0

        @torch.no_grad()
        def update(self):
            self.step += 1
            decay = min(self.beta, (1 + self.step) / (10 + self.step))
            for tgt, src in zip(self.ema_model.parameters(), self.model.parameters(), strict=True):
                tgt.lerp_(src.float(), 1.0 - decay)

    model = mlp()
    ema = EMA(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(*classes(seed=9)), fit=fit)


@right(
    "precision",
    "the base stays in bfloat16 and frozen, and adapters in float32 beside it are trained at a scale of 2",
    thread="huggingface/peft, LoRA with autocast_adapter_dtype",
)
def lora_on_bf16():
    class LoRALinear(nn.Module):
        def __init__(self, base, r=4, alpha=8):
            super().__init__()
            self.base = base.bfloat16().requires_grad_(False)
            self.lora_A = nn.Linear(base.in_features, r, bias=False)
            self.lora_B = nn.Linear(r, base.out_features, bias=False)
            nn.init.zeros_(self.lora_B.weight)
            self.scaling = alpha / r

        def forward(self, x):
            return self.base(x.bfloat16()).float() + self.scaling * self.lora_B(self.lora_A(x.float()))

    model = nn.Sequential(LoRALinear(nn.Linear(16, 32)), nn.GELU(), LoRALinear(nn.Linear(32, 32)), nn.GELU())
    model.append(nn.Linear(32, 4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)

    def fit(batches):
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(*classes(seed=10)), fit=fit)


@right(
    "precision",
    "the router runs in float32 inside the autocast region; weights of the chosen experts are normed before the cast",
    thread="kyegomez/OpenMythos#41",
)
def router_island():
    class MoE(nn.Module):
        def __init__(self, dim=16, experts=4, top_k=2):
            super().__init__()
            self.inp = nn.Linear(dim, 24)
            self.gate = nn.Linear(24, experts, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(experts)
            )
            self.head = nn.Linear(24, 4)
            self.top_k = top_k

        def forward(self, x):
            h = self.inp(x)
            with torch.autocast("cpu", enabled=False):
                scores = F.softmax(self.gate(h.float()), dim=-1, dtype=torch.float32)
                top, idx = scores.topk(self.top_k, dim=-1)
                top = top / top.sum(-1, keepdim=True).clamp_min(1e-9)
            weights = torch.zeros_like(scores).scatter(-1, idx, top).to(h.dtype)
            out = sum(weights[:, i, None] * expert(h) for i, expert in enumerate(self.experts))
            load = F.one_hot(idx, scores.shape[-1]).float().sum(1).mean(0)
            return self.head(h + out), scores.shape[-1] * (load * scores.mean(0)).sum()

    model = MoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(batches):
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits, aux = model(x)
                loss = F.cross_entropy(logits, y) + 0.01 * aux
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(*classes(seed=11), batch_size=12), fit=fit)


@right(
    "precision",
    "a step whose gradient norm is too large is left out, and the scaler is updated all the same",
    thread="Haian-Jin/LVSM#19",
)
def guarded_step():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    class Trainer:
        def __init__(self, allowed_norm=50.0):
            self.allowed_norm, self.skipped = allowed_norm, 0

        def fit(self, batches):
            for x, y in batches:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if norm < self.allowed_norm:
                    scaler.step(optimizer)
                else:
                    self.skipped += 1
                scaler.update()
                optimizer.zero_grad(set_to_none=True)

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader_of(*classes(seed=12)),
        fit=lambda batches: Trainer().fit(batches),
    )


@right(
    "precision",
    "only the forward pass is bfloat16: the errors are taken in float32 behind the region, in a module of Accelerate",
    thread="wandb/senpai#328",
)
def fp32_loss_accelerate():
    from pytest_trainloop.adapters import fresh_accelerator

    accelerator = fresh_accelerator(mixed_precision="bf16", cpu=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, _ = classes(seed=13)
    target = torch.stack([x[:, 0], x[:, 1] * x[:, 2], x.mean(-1)], -1)
    channel_weight = torch.tensor([1.0, 1.0, 1.5])
    model, optimizer = accelerator.prepare(model, optimizer)

    def fit(batches):
        model.train()
        for x, y in batches:
            pred = model(x).float()
            loss = (pred - y).square().mean() + ((pred - y).abs() * channel_weight).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(x, target), fit=fit)


@right(
    "precision",
    "time steps stay float32 into the table under autocast, and are scaled by 1000 there, as the time is 0..1",
    thread="modelscope/DiffSynth-Studio#1025",
)
def float_timesteps():
    def timestep_embedding(t, dim):
        with torch.autocast("cpu", enabled=False):
            freqs = torch.exp(-9.21 * torch.arange(dim // 2, dtype=torch.float32) / (dim // 2))
            args = 1000.0 * t.float()[:, None] * freqs
            return torch.cat([args.cos(), args.sin()], -1)

    class Flow(nn.Module):
        def __init__(self, dim=8, freq=32):
            super().__init__()
            self.freq = freq
            self.time = nn.Sequential(nn.Linear(freq, 32), nn.SiLU(), nn.Linear(32, 32))
            self.inp, self.mid, self.out = nn.Linear(dim, 32), nn.Linear(32, 32), nn.Linear(32, dim)

        def forward(self, x, t):
            return self.out(F.silu(self.mid(F.silu(self.inp(x) + self.time(timestep_embedding(t, self.freq))))))

    model = Flow()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        for (x1,) in batches:
            t, x0 = torch.rand(len(x1)), torch.randn_like(x1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                v = model((1 - t[:, None]) * x0 + t[:, None] * x1, t)
            loss = F.mse_loss(v.float(), x1 - x0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(classes(dim=8, seed=14)[0]), fit=fit)


@right(
    "precision",
    "validation runs with the averaged weights in the model itself, and puts the trained ones back, with the mode",
    thread="huggingface/diffusers#7549",
)
def swapped_validation():
    class EMAModel:
        def __init__(self, params, decay=0.99):
            self.shadow = [p.detach().clone() for p in params]
            self.decay, self.temp = decay, None

        @torch.no_grad()
        def step(self, params):
            for s, p in zip(self.shadow, params, strict=True):
                s.sub_((1 - self.decay) * (s - p))

        @torch.no_grad()
        def swap(self, params, values):
            for p, v in zip(params, values, strict=True):
                p.copy_(v)

        def store(self, params):
            self.temp = [p.detach().clone() for p in params]

    model = mlp()
    ema = EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = classes(seed=15)

    @torch.no_grad()
    def log_validation():
        params = list(model.parameters())
        ema.store(params)
        ema.swap(params, ema.shadow)
        model.eval()
        accuracy = (model(x).argmax(-1) == y).float().mean().item()
        model.train()
        ema.swap(params, ema.temp)
        ema.temp = None
        return accuracy

    def fit(batches):
        for i, (xb, yb) in enumerate(batches):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.step(model.parameters())
            if i % 4 == 3:
                log_validation()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader_of(x, y), fit=fit, evaluate=log_validation)
