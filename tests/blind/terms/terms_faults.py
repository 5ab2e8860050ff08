"""Terms, weights and targets."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import Padding, TrainLoop
from pytest_trainloop.adapters import from_lightning
from tests.blind.cases import fault


def regression(n=48, dim=8, out=1, seed=100):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    return TensorDataset(x, (x @ torch.randn(dim, out, generator=g)).tanh() + 0.05 * torch.randn(n, out, generator=g))


def labelled(n=48, dim=8, k=4, seed=101):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % k
    return TensorDataset(torch.randn(k, dim, generator=g)[y] + 0.5 * torch.randn(n, dim, generator=g), y)


def mlp(dim, out, width=24):
    return nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, out))


@fault(
    "terms",
    "loss with the auxiliary term is built for the log, and reconstruction_loss is returned to the backward pass",
    thread="oclivegriffin/crosscode#3",
    check="every_term_trains",
)
def topk_crosscoder():
    class TopK(nn.Module):
        def __init__(self, dim=8, latents=32, k=4):
            super().__init__()
            self.enc, self.dec, self.k = nn.Linear(dim, latents), nn.Linear(latents, dim), k

        def forward(self, x):
            pre = self.enc(x).relu()
            top, idx = pre.topk(self.k, -1)
            hidden = torch.zeros_like(pre).scatter(-1, idx, top)
            return self.dec(hidden), pre, hidden

    class TopKTrainer:
        def __init__(self, lambda_aux=0.25):
            self.model, self.lambda_aux = TopK(), lambda_aux
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
            self.history = []

        def aux_loss(self, x, recon, pre, hidden):
            dead = (hidden > 0).sum(0) == 0
            pre = pre * dead
            top, idx = pre.topk(8, -1)
            revived = F.linear(torch.zeros_like(pre).scatter(-1, idx, top), self.model.dec.weight)
            return ((x - recon).detach() - revived).pow(2).sum(-1).mean()

        def _calculate_loss_and_log(self, x, log):
            recon, pre, hidden = self.model(x)
            reconstruction_loss = (recon - x).pow(2).sum(-1).mean()
            aux_loss = self.aux_loss(x, recon, pre, hidden)
            loss = reconstruction_loss + self.lambda_aux * aux_loss
            if log:
                self.history.append({"train/loss": loss.item(), "train/aux_loss": aux_loss.item()})
                return reconstruction_loss
            return reconstruction_loss

        def train(self, batches):
            for step, (x, _) in enumerate(batches):
                self.optimizer.zero_grad()
                self._calculate_loss_and_log(x, log=step % 2 == 0).backward()
                self.optimizer.step()

    trainer = TopKTrainer()
    return TrainLoop(
        model=trainer.model,
        optimizer=trainer.optimizer,
        batches=DataLoader(regression(), batch_size=12, shuffle=True),
        fit=trainer.train,
    )


@dataclass
class CompressiveOutput:
    logits: torch.Tensor
    aux_loss: torch.Tensor


@fault(
    "terms",
    "queries, keys and the compressed memory are all detached before the auxiliary attention loss: it has no graph",
    thread="lucidrains/compressive-transformer-pytorch#5",
    check="every_term_trains",
)
def compressive_memory():
    class CompressiveLM(nn.Module):
        def __init__(self, vocab=20, dim=16, ratio=2):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim)
            self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
            self.compress = nn.Conv1d(dim, dim, ratio, stride=ratio)
            self.out = nn.Linear(dim, vocab)

        def attend(self, q, memory):
            k, v = self.to_kv(memory).chunk(2, -1)
            return (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v

        def forward(self, memory_ids, ids):
            memory, x = self.emb(memory_ids), self.emb(ids)
            compressed = self.compress(memory.detach().transpose(1, 2)).transpose(1, 2)
            q = self.to_q(x)
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            k, v = self.to_kv(x).chunk(2, -1)
            scores = (q @ k.transpose(1, 2) / 4.0).masked_fill(~causal, -1e9)
            h = x + scores.softmax(-1) @ v + self.attend(q, memory)
            q, old_mem, new_cmem = (t.detach() for t in (q, memory, compressed))
            with torch.no_grad():
                wanted = self.attend(q, old_mem)
                got = self.attend(q, new_cmem)
            return CompressiveOutput(self.out(h), F.mse_loss(wanted, got))

    g = torch.Generator().manual_seed(102)
    start = torch.randint(20, (40, 1), generator=g)
    ids = (start + 3 * torch.arange(13)[None]) % 20
    model = CompressiveLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def train(batches, aux_weight=1.0):
        for (seq,) in batches:
            out = model(seq[:, :6], seq[:, 6:-1])
            loss = F.cross_entropy(out.logits.transpose(1, 2), seq[:, 7:]) + aux_weight * out.aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(ids), batch_size=8, shuffle=True),
        fit=train,
    )


@fault(
    "terms",
    "the norms of the penalty are taken of weight.data, which has no graph: the penalty changes the loss's value only",
    thread="bioFAM/scDORI#19",
    check="every_term_trains",
)
def gene_programs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = mlp(8, 6)
            self.topic_decoder = nn.Linear(6, 8, bias=False)
            self.gene_linking = nn.Linear(6, 8, bias=False)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    config = {"l1_penalty": 0.05, "l2_penalty": 0.01}

    def compute_loss(x):
        theta = model.encoder(x).softmax(-1)
        recon = F.mse_loss(model.topic_decoder(theta) + model.gene_linking(theta), x)
        l1 = torch.norm(model.gene_linking.weight.data, p=1)
        l2 = torch.norm(model.topic_decoder.weight.data, p=2)
        loss_norm = config["l1_penalty"] * l1 + config["l2_penalty"] * l2
        return recon + loss_norm

    def train(batches):
        for x, _ in batches:
            optimizer.zero_grad()
            loss = compute_loss(x)
            loss.backward()
            optimizer.step()

    loader = DataLoader(labelled(seed=103), batch_size=12, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "terms",
    "output = nn.Linear(...) and LayerNorm are made inside forward: new random weights in every call, held by nobody",
    thread="graykode/nlp-tutorial#29",
    check="weights_are_read",
)
def transformer_tutorial():
    class MultiHeadAttention(nn.Module):
        def __init__(self, d_model=16, n_heads=2):
            super().__init__()
            self.d, self.h = d_model, n_heads
            self.W_Q, self.W_K, self.W_V = (nn.Linear(d_model, d_model) for _ in range(3))

        def forward(self, x, mask):
            b = x.size(0)
            q, k, v = (
                w(x).view(b, -1, self.h, self.d // self.h).transpose(1, 2) for w in (self.W_Q, self.W_K, self.W_V)
            )
            scores = (q @ k.transpose(-1, -2) / math.sqrt(self.d // self.h)).masked_fill(mask[:, None, None], -1e9)
            context = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, -1, self.d)
            output = nn.Linear(self.d, self.d)(context)
            return nn.LayerNorm(self.d)(output + x)

    class Encoder(nn.Module):
        def __init__(self, vocab=24):
            super().__init__()
            self.emb = nn.Embedding(vocab, 16, padding_idx=0)
            self.attention, self.classifier = MultiHeadAttention(), nn.Linear(16, 3)

        def forward(self, ids):
            mask = ids == 0
            h = self.attention(self.emb(ids), mask)
            keep = (~mask).unsqueeze(-1)
            return self.classifier((h * keep).sum(1) / keep.sum(1))

    def batches(n, rows=8, length=9):
        g = torch.Generator().manual_seed(104)
        out = []
        for _ in range(n):
            lengths = torch.randint(3, length, (rows,), generator=g)
            ids = torch.randint(1, 24, (rows, length), generator=g)
            ids = ids.masked_fill(torch.arange(length)[None] >= lengths[:, None], 0)
            out.append({"input_ids": ids, "label": ids[:, 0] % 3})
        return out

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def train(data):
        for batch in data:
            optimizer.zero_grad()
            loss = criterion(model(batch["input_ids"]), batch["label"])
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=batches,
        fit=train,
        padding=Padding(pad_id=0, dim=1, of=("input_ids",)),
    )


@fault(
    "terms",
    "cur_param is cut from saved_param and not from the model's parameter, so the EWC penalty is saved - saved = 0",
    thread="ContinualAI/avalanche#1099",
    check="every_term_trains",
)
def elastic_weights():
    class EWCPlugin:
        def __init__(self, model, ewc_lambda=50.0):
            self.ewc_lambda = ewc_lambda
            self.saved_params = {n: p.detach().clone() - 0.05 for n, p in model.named_parameters()}
            self.importances = {n: torch.rand_like(p) for n, p in model.named_parameters()}

        def before_backward(self, model, loss):
            penalty = torch.zeros(())
            for name, cur_param in model.named_parameters():
                saved_param, imp = self.saved_params[name], self.importances[name]
                n_units = saved_param.shape[0]
                cur_param = saved_param[:n_units]
                penalty = penalty + (imp * (cur_param - saved_param).pow(2)).sum()
            return loss + self.ewc_lambda * penalty

    model = mlp(8, 4)
    plugin = EWCPlugin(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def train(batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = plugin.before_backward(model, F.cross_entropy(model(x), y))
            loss.backward()
            optimizer.step()

    loader = DataLoader(labelled(seed=105), batch_size=12, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


class AuxLossAutoScaler(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, aux_loss):
        ctx.save_for_backward(aux_loss)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        (aux_loss,) = ctx.saved_tensors
        return grad_output, torch.ones_like(aux_loss)


@fault(
    "terms",
    "AuxLossAutoScaler.apply(weights, aux_loss) is called and its result dropped, so the balancing loss "
    "never gets a gradient",
    thread="NVIDIA-NeMo/Automodel#1408",
    check="every_term_trains",
)
def mixture_of_experts():
    class Gate(nn.Module):
        def __init__(self, dim=8, experts=4, topk=2, aux_loss_coeff=0.05):
            super().__init__()
            self.proj, self.n, self.topk, self.coeff = (
                nn.Linear(dim, experts, bias=False),
                experts,
                topk,
                aux_loss_coeff,
            )

        def forward(self, x):
            scores = self.proj(x).softmax(-1)
            weights, indices = scores.topk(self.topk, -1)
            if self.coeff > 0 and self.training:
                load = F.one_hot(indices, self.n).float().sum(1).mean(0)
                aux_loss = self.coeff * (load * scores.mean(0)).sum() * self.n / self.topk
                AuxLossAutoScaler.apply(weights, aux_loss)
            return weights / weights.sum(-1, keepdim=True), indices

    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = Gate()
            self.experts = nn.ModuleList(mlp(8, 8, 12) for _ in range(4))
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            weights, indices = self.gate(x)
            outs = torch.stack([e(x) for e in self.experts], 1)
            picked = outs.gather(1, indices.unsqueeze(-1).expand(-1, -1, 8))
            return self.head(x + (weights.unsqueeze(-1) * picked).sum(1))

    model = MoE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        model.train()
        for x, y in batches:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(regression(seed=106), batch_size=12, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "terms",
    "__getitem__ scales self.targets[i] in place, so each visit of an example divides its target again",
    thread="mindee/doctr#840",
    check="learnable_targets",
)
def keypoints():
    class KeypointDataset(Dataset):
        def __init__(self, n=24, size=16):
            g = torch.Generator().manual_seed(107)
            self.size = size
            centre = torch.rand(n, 2, generator=g) * size
            grid = torch.arange(size).float()
            self.images = torch.exp(
                -(
                    (grid[None, :, None] - centre[:, 1, None, None]) ** 2
                    + (grid[None, None] - centre[:, 0, None, None]) ** 2
                )
                / 8
            )
            self.targets = list(centre)

        def _to_relative(self, target):
            target /= self.size
            return target

        def __len__(self):
            return len(self.images)

        def __getitem__(self, i):
            return self.images[i].flatten(), self._to_relative(self.targets[i])

    model = mlp(256, 2, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        for image, target in batches:
            loss = F.smooth_l1_loss(model(image).sigmoid(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(KeypointDataset(), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "terms",
    "targets are standardised in place in the loop: a batch that comes again is standardised again",
    thread="pytorch/vision#680",
    check="learnable_targets",
)
def price_model():
    class PriceTrainer:
        def __init__(self, mean=40.0, std=12.0, epochs=2):
            self.net = mlp(8, 1)
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
            self.mean, self.std, self.epochs = mean, std, epochs

        def prepare(self, y):
            return y.sub_(self.mean).div_(self.std)

        def predict(self, x):
            with torch.no_grad():
                return self.net(x) * self.std + self.mean

        def fit(self, batches):
            for _ in range(self.epochs):
                for x, y in batches:
                    loss = F.mse_loss(self.net(x), self.prepare(y))
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()

    def batches(n, rows=10):
        g = torch.Generator().manual_seed(108)
        w = torch.randn(8, 1, generator=g)
        out = []
        for _ in range(n):
            x = torch.randn(rows, 8, generator=g)
            out.append((x, 40 + 4 * x @ w))
        return out

    trainer = PriceTrainer()
    return TrainLoop(model=trainer.net, optimizer=trainer.optimizer, batches=batches, fit=trainer.fit)


@fault(
    "terms",
    "the text encoder's outputs are computed once under no_grad and read from the cache, while its "
    "weights are in the optimizer",
    thread="kohya-ss/sd-scripts#890",
    check="weights_are_read",
)
def caption_training():
    class NetworkTrainer:
        def __init__(self, train_text_encoder=True, prompts=6):
            g = torch.Generator().manual_seed(109)
            self.prompts = torch.randint(20, (prompts, 5), generator=g)
            self.text_encoder = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 12), nn.GELU())
            self.unet = mlp(8 + 12, 8, 32)
            params = [{"params": self.unet.parameters()}]
            if train_text_encoder:
                params.append({"params": self.text_encoder.parameters(), "lr": 2e-4})
            self.optimizer = torch.optim.AdamW(params, lr=1e-3)
            self.cache_text_encoder_outputs()

        @torch.no_grad()
        def cache_text_encoder_outputs(self):
            self.text_cache = self.text_encoder(self.prompts).mean(1)

        def process_batch(self, latents, caption):
            noise = torch.randn_like(latents)
            sigma = torch.rand(len(latents), 1)
            noisy = (1 - sigma) * latents + sigma * noise
            pred = self.unet(torch.cat([noisy, self.text_cache[caption]], 1))
            return F.mse_loss(pred, noise - latents)

        def train(self, batches):
            self.text_encoder.train()
            for latents, caption in batches:
                loss = self.process_batch(latents, caption)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()

    trainer = NetworkTrainer()
    return TrainLoop(
        model={"unet": trainer.unet, "text_encoder": trainer.text_encoder},
        optimizer=trainer.optimizer,
        batches=DataLoader(labelled(k=6, seed=110), batch_size=12, shuffle=True),
        fit=trainer.train,
    )


@fault(
    "terms",
    "the strong view's logits are taken from the weak view's output, so the consistency compares a tensor with itself",
    thread="microsoft/Semi-supervised-learning#102",
    check="every_term_trains",
)
def mean_teacher():
    class MeanTeacher:
        def __init__(self, ulb_weight=5.0, ema_m=0.99):
            self.model = mlp(8, 4)
            self.ema = copy.deepcopy(self.model).requires_grad_(False)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
            self.ulb_weight, self.ema_m = ulb_weight, ema_m

        def train_step(self, x_lb, y_lb):
            x_ulb_w = x_lb + 0.05 * torch.randn_like(x_lb)
            x_ulb_s = x_lb + 0.4 * torch.randn_like(x_lb)
            sup_loss = F.cross_entropy(self.model(x_lb), y_lb)
            outs_x_ulb_w = {"logits": self.model(x_ulb_w)}
            outs_x_ulb_s = {"logits": self.model(x_ulb_s)}
            logits_x_ulb_w = outs_x_ulb_w["logits"]
            logits_x_ulb_s = outs_x_ulb_w["logits"]
            unsup_loss = F.mse_loss(logits_x_ulb_s.softmax(-1), logits_x_ulb_w.softmax(-1).detach())
            loss = sup_loss + self.ulb_weight * unsup_loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for p, q in zip(self.model.parameters(), self.ema.parameters(), strict=True):
                q.lerp_(p.detach(), 1 - self.ema_m)
            return {"sup": sup_loss.item(), "unsup": unsup_loss.item(), "extra": outs_x_ulb_s["logits"].shape}

    algorithm = MeanTeacher()
    return TrainLoop(
        model={"model": algorithm.model, "ema": algorithm.ema},
        optimizer=algorithm.optimizer,
        batches=DataLoader(labelled(seed=111), batch_size=12, shuffle=True),
        fit=lambda batches: [algorithm.train_step(x, y) for x, y in batches],
    )


@fault(
    "terms",
    "the student's jump is finished by the frozen copy under no_grad, and so is its target: the "
    "consistency term has no graph",
    thread="Aaditya-Prasad/consistency-policy#4",
    check="every_term_trains",
)
def consistency_student():
    class Trajectory(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(8 + 2, 8, 32)

        def forward(self, x, t, s):
            return x + (t - s) * self.net(torch.cat([x, t, s], 1))

    class CTMPolicy:
        def __init__(self, losses=None):
            self.losses = losses or {"ctm": 1.0, "dsm": 1.0}
            self.model = Trajectory()
            self.model_ema = copy.deepcopy(self.model).requires_grad_(False)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

        def compute_loss(self, trajectory):
            noise = torch.randn_like(trajectory)
            t = torch.rand(len(trajectory), 1) * 0.8 + 0.2
            u, s = t * 0.9, t * torch.rand_like(t) * 0.5
            pred = self.model(trajectory + t * noise, t, s)
            with torch.no_grad():
                target = self.model_ema(trajectory + u * noise, u, s)
            with torch.no_grad():
                start = torch.full_like(t, 0.01)
                pred = self.model_ema(pred, s, start)
                target = self.model_ema(target, s, start)
            ctm = F.huber_loss(pred, target)
            dsm = F.mse_loss(self.model(trajectory + t * noise, t, torch.zeros_like(t)), trajectory)
            return self.losses["ctm"] * ctm + self.losses["dsm"] * dsm

        def fit(self, batches):
            for x, _ in batches:
                loss = self.compute_loss(x)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                for p, q in zip(self.model.parameters(), self.model_ema.parameters(), strict=True):
                    q.lerp_(p.detach(), 0.01)

    policy = CTMPolicy()
    return TrainLoop(
        model={"model": policy.model, "model_ema": policy.model_ema},
        optimizer=policy.optimizer,
        batches=DataLoader(labelled(seed=115), batch_size=12, shuffle=True),
        fit=policy.fit,
    )


@fault(
    "terms",
    "the auxiliary head's loss is returned as main_loss * 0: aux_head gets no gradient",
    thread="mseg-dataset/mseg-semantic#16",
    check="every_term_trains",
)
def scene_parsing():
    class SegModel(nn.Module):
        def __init__(self, classes=3):
            super().__init__()
            self.stem, self.body = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.cls_head, self.aux_head = nn.Conv2d(8, classes, 1), nn.Conv2d(8, classes, 1)
            self.criterion = nn.CrossEntropyLoss(ignore_index=255)

        def forward(self, x, y):
            low = self.stem(x).relu()
            out, aux = self.cls_head(self.body(low).relu()), self.aux_head(low)
            main_loss = self.criterion(out, y)
            aux_loss = self.criterion(aux, y)
            aux_loss = main_loss * 0
            return out.argmax(1), main_loss, aux_loss

    g = torch.Generator().manual_seed(112)
    images = torch.randn(32, 1, 8, 8, generator=g)
    labels = (images.squeeze(1) > 0.5).long() + (images.squeeze(1) > -0.5).long()
    model = SegModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def train(batches, aux_weight=0.4):
        for x, y in batches:
            _, main_loss, aux_loss = model(x, y)
            loss = main_loss + aux_weight * aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "terms",
    "the output projection is a copy of the embedding's initial weights in a buffer, where tied weights are meant",
    thread="EdinburghNLP/nematus#117",
    check="weights_are_read",
)
def tied_language_model():
    class TiedLM(nn.Module):
        def __init__(self, vocab=20, dim=16):
            super().__init__()
            self.embedding = nn.Embedding(vocab, dim)
            nn.init.normal_(self.embedding.weight, std=dim**-0.5)
            self.rnn = nn.GRU(dim, dim, batch_first=True)
            self.register_buffer("proj", self.embedding.weight.detach().clone())

        def forward(self, ids):
            h, _ = self.rnn(self.embedding(ids))
            return F.linear(h, self.proj)

    g = torch.Generator().manual_seed(113)
    ids = (torch.randint(20, (40, 1), generator=g) + 7 * torch.arange(10)[None]) % 20
    model = TiedLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train(batches):
        for (seq,) in batches:
            logits = model(seq[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 20), seq[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(ids), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "terms",
    "the data set has standardised the labels already, and training_step standardises them once more "
    "with the raw statistics",
    thread="deepset-ai/FARM#456",
    check="learnable_targets",
)
def lit_regression():
    class LabelDataset(Dataset):
        def __init__(self, n=48):
            g = torch.Generator().manual_seed(114)
            self.x = torch.randn(n, 8, generator=g)
            raw = 60 + 9 * self.x[:, 0] - 4 * self.x[:, 3] + torch.randn(n, generator=g)
            self.mean, self.std = raw.mean().item(), raw.std().item()
            self.y = (raw - self.mean) / self.std

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return {"features": self.x[i], "label": self.y[i]}

    class LitRegressor(lightning.LightningModule):
        def __init__(self, dataset):
            super().__init__()
            self.net, self.dataset = mlp(8, 1), dataset

        def training_step(self, batch, batch_idx):
            target = (batch["label"] - self.dataset.mean) / self.dataset.std
            loss = F.mse_loss(self.net(batch["features"]).squeeze(-1), target)
            self.log("train_loss", loss)
            return loss

        def predict_step(self, batch, batch_idx):
            return self.net(batch["features"]).squeeze(-1) * self.dataset.std + self.dataset.mean

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=2e-3)

        def train_dataloader(self):
            return DataLoader(self.dataset, batch_size=12, shuffle=True)

    return from_lightning(LitRegressor(LabelDataset()))
