"""Terms, weights and targets that are right although they look odd."""

from __future__ import annotations

import copy
import math
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Trainer, TrainingArguments

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_trainer
from tests.blind.cases import right


def labelled(n=48, dim=8, k=4, seed=120):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % k
    return TensorDataset(torch.randn(k, dim, generator=g)[y] + 0.5 * torch.randn(n, dim, generator=g), y)


def loader(data, size=12):
    return DataLoader(data, batch_size=size, shuffle=True)


def mlp(dim, out, width=24):
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, out))


class ReverseLayerF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.alpha, None


@right(
    "terms",
    "the domain loss is added: a layer between turns its gradient for the extractor, by a factor that begins at 0",
    thread="CuthbertCai/pytorch_DANN#13",
)
def domain_adversarial():
    extractor, class_net, domain_net = mlp(8, 12), nn.Linear(12, 4), mlp(12, 2)
    params = [*extractor.parameters(), *class_net.parameters(), *domain_net.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9)
    state = {"step": 0}

    def fit(batches, total=40):
        for x, y in batches:
            p = min(1.0, state["step"] / total)
            constant = 2.0 / (1.0 + math.exp(-10 * p)) - 1
            source, target = extractor(x), extractor(1.2 * x + 0.5)
            class_loss = F.cross_entropy(class_net(source), y)
            feats = ReverseLayerF.apply(torch.cat([source, target]), constant)
            domains = torch.cat([torch.zeros(len(x)), torch.ones(len(x))]).long()
            loss = class_loss + F.cross_entropy(domain_net(feats), domains)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1

    model = {"extractor": extractor, "class_net": class_net, "domain_net": domain_net}
    return TrainLoop(model=model, optimizer=optimizer, batches=loader(labelled()), fit=fit)


@right(
    "terms",
    "first-order MAML: the gradient at adapted copies of the weights is assigned to the weights themselves",
    thread="katerakelly/pytorch-maml#11",
)
def first_order_maml():
    net = mlp(1, 1, 32)
    meta_opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def tasks(n, rows=4, shots=6):
        g = torch.Generator().manual_seed(121)
        out = []
        for _ in range(n):
            amp = torch.rand(rows, 1, 1, generator=g) * 2 + 0.5
            phase = torch.rand(rows, 1, 1, generator=g) * math.pi
            xs, xq = (torch.rand(rows, shots, 1, generator=g) * 6 - 3 for _ in range(2))
            out.append({"xs": xs, "ys": amp * (xs + phase).sin(), "xq": xq, "yq": amp * (xq + phase).sin()})
        return out

    def fit(batches, inner_lr=0.02, steps=2):
        for b in batches:
            meta_opt.zero_grad()
            grads = [torch.zeros_like(p) for p in net.parameters()]
            rows = len(b["xs"])
            for i in range(rows):
                fast = copy.deepcopy(net)
                for _ in range(steps):
                    loss = F.mse_loss(fast(b["xs"][i]), b["ys"][i])
                    inner = torch.autograd.grad(loss, list(fast.parameters()))
                    with torch.no_grad():
                        for p, g in zip(fast.parameters(), inner, strict=True):
                            p.sub_(inner_lr * g)
                outer = torch.autograd.grad(F.mse_loss(fast(b["xq"][i]), b["yq"][i]), list(fast.parameters()))
                for total, g in zip(grads, outer, strict=True):
                    total.add_(g / rows)
            for p, g in zip(net.parameters(), grads, strict=True):
                p.grad = g
            meta_opt.step()

    return TrainLoop(model=net, optimizer=meta_opt, batches=tasks, fit=fit)


@right(
    "terms",
    "a consistency term to an averaged teacher whose weight rises from nearly 0; the teacher has no "
    "gradient and no optimizer",
    thread="CuriousAI/mean-teacher#26",
)
def mean_teacher_rampup():
    student = mlp(8, 4)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    clock = {"step": 0}
    x_all, y_all = labelled(seed=122).tensors
    data = TensorDataset(x_all, y_all.masked_fill(torch.arange(len(y_all)) % 3 == 1, -1))

    def sigmoid_rampup(current, length=30):
        phase = 1.0 - min(max(current, 0.0), length) / length
        return math.exp(-5.0 * phase * phase)

    def fit(batches, consistency=5.0):
        for x, y in batches:
            logits = student(x + 0.1 * torch.randn_like(x))
            with torch.no_grad():
                ema_logit = teacher(x + 0.1 * torch.randn_like(x))
            minibatch = max(int((y != -1).sum()), 1)
            class_loss = F.cross_entropy(logits, y, reduction="sum", ignore_index=-1) / minibatch
            distance = F.mse_loss(logits.softmax(1), ema_logit.softmax(1), reduction="sum") / 4 / len(x)
            loss = class_loss + consistency * sigmoid_rampup(clock["step"]) * distance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock["step"] += 1
            alpha = min(1 - 1 / (clock["step"] + 1), 0.99)
            for ema, p in zip(teacher.parameters(), student.parameters(), strict=True):
                ema.data.mul_(alpha).add_(p.data, alpha=1 - alpha)

    return TrainLoop(model={"student": student, "teacher": teacher}, optimizer=optimizer, batches=loader(data), fit=fit)


@right(
    "terms",
    "the frozen feature net is called with a graph for the output and under no_grad for the original: "
    "the gradient runs through it",
    thread="KupynOrest/DeblurGAN#77",
)
def perceptual():
    class PerceptualLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
            self.eval().requires_grad_(False)

        def forward(self, fake, real):
            with torch.no_grad():
                wanted = self.features(real)
            return F.mse_loss(self.features(fake), wanted)

    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    content = PerceptualLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(123)
    sharp = (torch.rand(32, 1, 8, 8, generator=g) > 0.6).float()
    blurred = F.avg_pool2d(sharp, 3, 1, 1)

    def fit(batches, weight=0.5):
        for x, y in batches:
            out = net(x)
            loss = (out - y).abs().mean() + weight * content(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"net": net, "content": content},
        optimizer=optimizer,
        batches=loader(TensorDataset(blurred, sharp), 8),
        fit=fit,
        frozen=("content.",),
    )


@right(
    "terms",
    "loss_vlb is computed and logged, and enters the loss with original_elbo_weight, which is 0 by default",
    thread="CompVis/latent-diffusion#349",
)
def latent_diffusion():
    class DDPM(nn.Module):
        def __init__(self, original_elbo_weight=0.0, l_simple_weight=1.0):
            super().__init__()
            self.model = mlp(9, 8, 32)
            self.original_elbo_weight, self.l_simple_weight = original_elbo_weight, l_simple_weight
            betas = torch.linspace(1e-3, 0.08, 50)
            alphas = torch.cumprod(1 - betas, 0)
            self.register_buffer("alphas_cumprod", alphas)
            self.register_buffer("lvlb_weights", betas**2 / (2 * betas * (1 - betas) * (1 - alphas)))

        def p_losses(self, x, t):
            noise = torch.randn_like(x)
            a = self.alphas_cumprod[t].view(-1, 1)
            out = self.model(torch.cat([a.sqrt() * x + (1 - a).sqrt() * noise, t.view(-1, 1) / 50], 1))
            per_row = (out - noise).pow(2).mean(1)
            loss_dict = {"loss_simple": per_row.mean().item()}
            loss = self.l_simple_weight * per_row.mean()
            loss_vlb = (self.lvlb_weights[t] * per_row).mean()
            loss_dict["loss_vlb"] = loss_vlb.item()
            loss = loss + self.original_elbo_weight * loss_vlb
            return loss, loss_dict

    ddpm, log = DDPM(), []
    optimizer = torch.optim.AdamW(ddpm.parameters(), lr=1e-3)

    def fit(batches):
        for x, _ in batches:
            loss, loss_dict = ddpm.p_losses(x, torch.randint(0, 50, (len(x),)))
            log.append(loss_dict)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=ddpm, optimizer=optimizer, batches=loader(labelled(seed=124)), fit=fit)


@right(
    "terms",
    "EWC after a task: importances and clones of the weights of then, so the penalty is exactly 0 at the first step",
    thread="ContinualAI/avalanche#1101",
)
def elastic_weights():
    model = mlp(8, 4)
    saved = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fisher = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    x_old, y_old = labelled(16, seed=125).tensors
    for x, y in zip(x_old.split(1), y_old.split(1), strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for name, g in zip(fisher, grads, strict=True):
            fisher[name] += g.pow(2) / len(x_old)

    def fit(batches, ewc_lambda=20.0):
        for x, y in batches:
            penalty = sum((fisher[n] * (p - saved[n]).pow(2)).sum() for n, p in model.named_parameters())
            loss = F.cross_entropy(model(x), y) + ewc_lambda / 2 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(labelled(seed=126)), fit=fit)


@right(
    "terms",
    "learned log-variances weigh the tasks, a regression with one half and a classification without; the "
    "total falls below 0",
    thread="lukasliebel/MultiDepth#2",
)
def multi_task():
    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.depth, self.seg = mlp(8, 16), nn.Linear(16, 1), nn.Linear(16, 4)
            self.log_vars = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in ("depth", "seg")})

        def forward(self, x):
            h = self.trunk(x).relu()
            return {"depth": self.depth(h).squeeze(-1), "seg": self.seg(h)}

    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def fit(batches):
        for x, y in batches:
            out = model(x)
            depth, seg = F.mse_loss(out["depth"], x[:, 0] - x[:, 1]), F.cross_entropy(out["seg"], y)
            s = model.log_vars
            loss = 0.5 * torch.exp(-s["depth"]) * depth + 0.5 * s["depth"]
            loss = loss + torch.exp(-s["seg"]) * seg + 0.5 * s["seg"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(labelled(seed=127)), fit=fit)


@right(
    "terms",
    "the centres have an optimizer of their own, and their gradient is divided by the term's weight before its step",
    thread="KaiyangZhou/pytorch-center-loss#2",
)
def center_loss():
    class CenterLoss(nn.Module):
        def __init__(self, classes=4, dim=6):
            super().__init__()
            self.centers = nn.Parameter(torch.randn(classes, dim))

        def forward(self, x, labels):
            distmat = torch.cdist(x, self.centers).pow(2)
            mask = F.one_hot(labels, len(self.centers))
            return (distmat * mask).clamp(1e-12, 1e12).sum() / len(x)

    backbone, head, criterion_cent = mlp(8, 6), nn.Linear(6, 4), CenterLoss()
    optimizer_model = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.05, momentum=0.9)
    optimizer_cent = torch.optim.SGD(criterion_cent.parameters(), lr=0.3)

    def fit(batches, weight_cent=0.05):
        for x, y in batches:
            feats = backbone(x)
            loss = F.cross_entropy(head(feats), y) + weight_cent * criterion_cent(feats, y)
            optimizer_model.zero_grad()
            optimizer_cent.zero_grad()
            loss.backward()
            optimizer_model.step()
            for param in criterion_cent.parameters():
                param.grad.data *= 1.0 / weight_cent
            optimizer_cent.step()

    return TrainLoop(
        model={"backbone": backbone, "head": head, "centers": criterion_cent},
        optimizer=[optimizer_model, optimizer_cent],
        batches=loader(labelled(seed=128)),
        fit=fit,
    )


class AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.required_aux_loss = loss.requires_grad
        return x

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, torch.ones(()) if ctx.required_aux_loss else None


@right(
    "terms",
    "the balancing loss is in no sum: a function that passes x on gives it the gradient 1; the loads in "
    "it are counts without a graph",
    thread="deepseek-ai/DeepSeek-MoE#17",
)
def deepseek_moe():
    class MoE(nn.Module):
        def __init__(self, dim=8, n=4, k=2, alpha=0.02):
            super().__init__()
            self.gate, self.n, self.k, self.alpha = nn.Linear(dim, n, bias=False), n, k, alpha
            self.experts = nn.ModuleList(mlp(dim, dim, 12) for _ in range(n))
            self.head = nn.Linear(dim, 4)

        def forward(self, x):
            scores = self.gate(x).softmax(-1)
            weight, idx = scores.topk(self.k, -1)
            y = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                share = (weight * (idx == i)).sum(-1, keepdim=True)
                y = y + share * expert(x)
            if self.training:
                ce = F.one_hot(idx.reshape(-1), self.n).float().mean(0)
                y = AddAuxiliaryLoss.apply(y, (scores.mean(0) * ce * self.n).sum() * self.alpha)
            return self.head(x + y)

    model = MoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(batches):
        model.train()
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(labelled(seed=129)), fit=fit)


@right(
    "terms",
    "an L1 penalty that stands in no loss: its subgradient is added to grad.data between backward and step",
    thread="foolwood/pytorch-slimming#3",
)
def network_slimming():
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    g = torch.Generator().manual_seed(130)
    y = torch.arange(36) % 3
    x = torch.randn(3, 1, 6, 6, generator=g)[y] + 0.5 * torch.randn(36, 1, 6, 6, generator=g)

    def update_bn(s=1e-4):
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.weight.grad.data.add_(s * torch.sign(m.weight.data))

    def fit(batches):
        net.train()
        for xb, yb in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(xb), yb).backward()
            update_bn()
            optimizer.step()

    return TrainLoop(model=net, optimizer=optimizer, batches=loader(TensorDataset(x, y)), fit=fit)


@right(
    "terms",
    "the residual is detached in the auxiliary term, so that dead latents follow the error and not the error them",
    thread="bartbussmann/BatchTopK#4",
)
def batch_topk():
    class BatchTopKSAE(nn.Module):
        def __init__(self, dim=8, latents=24, k=4):
            super().__init__()
            w = torch.randn(dim, latents) * 0.3
            self.W_enc, self.W_dec = nn.Parameter(w), nn.Parameter(w.T.clone())
            self.b_enc, self.b_dec = nn.Parameter(torch.zeros(latents)), nn.Parameter(torch.zeros(dim))
            self.k = k

        def forward(self, x):
            acts = ((x - self.b_dec) @ self.W_enc + self.b_enc).relu()
            top, idx = acts.flatten().topk(min(self.k * len(x), acts.numel()))
            sparse = torch.zeros_like(acts).flatten().scatter(0, idx, top).view_as(acts)
            recon = sparse @ self.W_dec + self.b_dec
            residual = (x - recon).detach()
            dead = (sparse > 0).sum(0) == 0
            revived = (acts * dead) @ self.W_dec
            aux = (revived - residual).pow(2).mean() if dead.any() else x.new_zeros(())
            return recon, aux

    sae = BatchTopKSAE()
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3, betas=(0.9, 0.99))

    def fit(batches, aux_penalty=1 / 32):
        for x, _ in batches:
            recon, aux = sae(x)
            loss = (recon - x).pow(2).mean() + aux_penalty * aux
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                sae.W_dec.div_(sae.W_dec.norm(dim=1, keepdim=True))

    return TrainLoop(model=sae, optimizer=optimizer, batches=loader(labelled(seed=131)), fit=fit, rows_interact=True)


@right(
    "terms",
    "GradNorm: the task weights learn from a difference of gradient norms, and are scaled back to their "
    "sum after the step",
    thread="AvivNavon/nash-mtl#4",
)
def grad_norm():
    accelerator = fresh_accelerator()
    trunk = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 12))
    heads = nn.ModuleList([nn.Linear(12, 1), nn.Linear(12, 4)])
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=2e-3)
    weight_opt = torch.optim.Adam([weights], lr=5e-3)
    trunk, heads, optimizer = accelerator.prepare(trunk, heads, optimizer)
    initial = {}

    def fit(batches, alpha=0.5):
        for x, y in batches:
            h = trunk(x)
            losses = torch.stack([F.mse_loss(heads[0](h).squeeze(-1), x[:, 0]), F.cross_entropy(heads[1](h), y)])
            first = initial.setdefault("losses", losses.detach().clone())
            shared = trunk[-1].weight
            norms = torch.stack(
                [
                    torch.autograd.grad(w * loss, shared, retain_graph=True, create_graph=True)[0].norm()
                    for w, loss in zip(weights, losses, strict=True)
                ]
            )
            ratio = losses.detach() / first
            wanted = (norms.mean() * (ratio / ratio.mean()) ** alpha).detach()
            weight_grad = torch.autograd.grad((norms - wanted).abs().sum(), weights, retain_graph=True)[0]
            optimizer.zero_grad()
            accelerator.backward((weights.detach() * losses).sum())
            optimizer.step()
            weights.grad = weight_grad
            weight_opt.step()
            with torch.no_grad():
                weights.clamp_(min=0.05).mul_(2 / weights.sum())

    return TrainLoop(
        model={"trunk": trunk, "heads": heads},
        optimizer=[optimizer, weight_opt],
        batches=loader(labelled(seed=132)),
        fit=fit,
    )


@right(
    "terms",
    "Trainer with its own compute_loss: labels are standardised once by the data set, and soft codes by "
    "a straight-through estimate",
    thread="pytorch/pytorch#48574",
)
def code_regression():
    class CodeModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.codes, self.out = mlp(8, 6), nn.Linear(6, 8, bias=False), nn.Linear(8, 1)

        def forward(self, features, labels=None):
            logits = self.enc(features)
            y_soft = F.softmax(logits, -1)
            y_hard = F.one_hot(y_soft.argmax(-1), 6).float()
            hidden = self.codes(y_hard - y_soft.detach() + y_soft)
            return {"logits": self.out(torch.relu(hidden + features)).squeeze(-1)}

    class ScoreDataset(Dataset):
        def __init__(self, n=48):
            g = torch.Generator().manual_seed(133)
            self.x = torch.randn(n, 8, generator=g)
            raw = 50 + 10 * self.x[:, 0].sign() + 3 * self.x[:, 1]
            self.y = (raw - raw.mean()) / raw.std()

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return {"features": self.x[i], "labels": self.y[i]}

    class RegressionTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = F.mse_loss(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    return from_trainer(RegressionTrainer(model=CodeModel(), args=args, train_dataset=ScoreDataset()))


@right(
    "terms",
    "the layer's weights are made anew in every forward pass, by a net that is held and trained; they "
    "are functions of its output",
    thread="shyamsn97/hyper-nn#6",
)
def hyper_network():
    class HyperRegressor(nn.Module):
        def __init__(self, context=4, dim=8, hidden=6):
            super().__init__()
            self.dim, self.hidden = dim, hidden
            self.hyper = mlp(context, dim * hidden + hidden, 16)
            self.head = nn.Linear(hidden, 1)

        def forward(self, context, x):
            params = self.hyper(context)
            w, b = params.split([self.dim * self.hidden, self.hidden], dim=-1)
            w = w.view(-1, self.hidden, self.dim) / self.dim**0.5
            return self.head(torch.tanh(torch.einsum("nhd,nd->nh", w, x) + b)).squeeze(-1)

    g = torch.Generator().manual_seed(134)
    kind = F.one_hot(torch.arange(48) % 4, 4).float()
    x = torch.randn(48, 8, generator=g)
    y = (kind @ torch.randn(4, 8, generator=g) * x).sum(-1)
    model = HyperRegressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def fit(batches):
        for context, inputs, target in batches:
            loss = F.mse_loss(model(context, inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(TensorDataset(kind, x, y)), fit=fit)


@right(
    "terms",
    "cosines and sines of rotary positions are kept from an earlier pass and renewed only for a longer "
    "sequence: no weight is in them",
    thread="openai/gpt-oss#43",
)
def rotary_cache():
    class Rotary(nn.Module):
        def __init__(self, dim=8, base=100.0):
            super().__init__()
            self.inv_freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
            self._cached_seq_len, self._cached = 0, None

        def get_cos_sin(self, n):
            if n > self._cached_seq_len:
                freqs = torch.outer(torch.arange(n).float(), self.inv_freq)
                self._cached, self._cached_seq_len = (freqs.cos(), freqs.sin()), n
            cos, sin = self._cached
            return cos[:n], sin[:n]

        def forward(self, x):
            cos, sin = self.get_cos_sin(x.shape[-2])
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    class TinyGPT(nn.Module):
        def __init__(self, vocab=16, dim=16, heads=2):
            super().__init__()
            self.emb, self.qkv, self.proj = nn.Embedding(vocab, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.norm, self.heads, self.rotary = nn.LayerNorm(dim), heads, Rotary(dim // heads)

        def forward(self, ids):
            x = self.emb(ids)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            h = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
            return F.linear(x + self.proj(h.transpose(1, 2).flatten(2)), self.emb.weight)

    g = torch.Generator().manual_seed(135)
    ids = (torch.randint(16, (40, 1), generator=g) + 5 * torch.arange(11)[None]) % 16
    model = TinyGPT()
    nn.init.normal_(model.emb.weight, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)

    def fit(batches):
        for (seq,) in batches:
            logits = model(seq[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(TensorDataset(ids), 8), fit=fit)


@right(
    "terms",
    "latents of a frozen encoder are computed once and looked up by the example's index, whatever the "
    "order of the batches",
    thread="huggingface/diffusers#14431",
)
def cached_latents():
    class DreamBoothDataset(Dataset):
        def __init__(self, n=48):
            g = torch.Generator().manual_seed(136)
            self.captions = torch.arange(n) % 6
            self.pixels = torch.randn(6, 12, generator=g)[self.captions] + 0.2 * torch.randn(n, 12, generator=g)

        def __len__(self):
            return len(self.captions)

        def __getitem__(self, index):
            return {"index": index, "pixel_values": self.pixels[index], "caption": self.captions[index]}

    dataset = DreamBoothDataset()
    vae = mlp(12, 6).eval().requires_grad_(False)
    transformer, prompts = mlp(6 + 8 + 1, 6, 32), nn.Embedding(6, 8)
    optimizer = torch.optim.AdamW([*transformer.parameters(), *prompts.parameters()], lr=1e-3)
    with torch.no_grad():
        latents_cache = vae(dataset.pixels) * 2.0

    def fit(batches):
        for batch in batches:
            model_input = latents_cache[batch["index"]]
            noise = torch.randn_like(model_input)
            sigmas = torch.rand(len(noise), 1)
            noisy = (1.0 - sigmas) * model_input + sigmas * noise
            pred = transformer(torch.cat([noisy, prompts(batch["caption"]), sigmas], 1))
            loss = (pred - (noise - model_input)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"transformer": transformer, "prompts": prompts}, optimizer=optimizer, batches=loader(dataset), fit=fit
    )


@right(
    "terms",
    "inputs are standardised and predictions scaled back before a masked loss in the data's own units; "
    "null readings count for nothing",
    thread="GestaltCogTeam/BasicTS#213",
)
def traffic_runner():
    class Scaler:
        def __init__(self, data):
            self.mean, self.std = data.mean().item(), data.std().item()

        def transform(self, x):
            return (x - self.mean) / self.std

        def inverse_transform(self, x):
            return x * self.std + self.mean

    def masked_mae(prediction, target, null_val=0.0):
        mask = (target != null_val).float()
        mask = torch.nan_to_num(mask / mask.mean())
        return torch.nan_to_num((prediction - target).abs() * mask).mean()

    g = torch.Generator().manual_seed(137)
    phase = torch.rand(48, 1, generator=g) * 6.28
    series = 55 + 12 * torch.sin(phase + torch.arange(16)[None] * 0.5) + torch.randn(48, 16, generator=g)
    history, future = series[:, :12], series[:, 12:].clone()
    future[torch.rand(48, 4, generator=g) < 0.1] = 0.0
    scaler, model = Scaler(history), mlp(12, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def fit(batches):
        for x, y in batches:
            prediction = scaler.inverse_transform(model(scaler.transform(x)))
            loss = masked_mae(prediction, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader(TensorDataset(history, future)), fit=fit)
