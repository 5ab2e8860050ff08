"""Recommenders and metric learning."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


class Triples(Dataset):
    """User, an item that the user had, an item that he had not."""

    def __init__(self, n=64, users=12, items=30, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.user = torch.randint(users, (n,), generator=g)
        self.pos = (self.user * 2 + torch.randint(4, (n,), generator=g)) % items
        self.neg = (self.pos + torch.randint(6, items - 6, (n,), generator=g)) % items

    def __len__(self):
        return len(self.user)

    def __getitem__(self, i):
        return {"user": self.user[i], "pos": self.pos[i], "neg": self.neg[i]}


class MF(nn.Module):
    def __init__(self, users=12, items=30, dim=16):
        super().__init__()
        self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1)


@fault(
    "recommenders",
    "softplus(pos - neg) pushes the positive item below the negative one: softplus wants neg - pos",
    thread="gusye1234/LightGCN-PyTorch#30",
    check="loss_formula",
)
def bpr_loss():
    class BPR:
        def __init__(self, weight_decay=1e-4):
            self.model = MF()
            self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-2)
            self.weight_decay = weight_decay

        def stage_one(self, users, pos, neg):
            pos_scores, neg_scores = self.model(users, pos), self.model(users, neg)
            loss = F.softplus(pos_scores - neg_scores).mean()
            reg = self.model.user(users).norm(2).pow(2) + self.model.item(pos).norm(2).pow(2)
            reg = 0.5 * (reg + self.model.item(neg).norm(2).pow(2)) / len(users)
            loss = loss + self.weight_decay * reg
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            return loss.item()

    bpr = BPR()
    loader = DataLoader(Triples(), batch_size=16, shuffle=True)
    return TrainLoop(
        model=bpr.model,
        optimizer=bpr.opt,
        batches=loader,
        fit=lambda batches: [bpr.stage_one(b["user"], b["pos"], b["neg"]) for b in batches],
    )


@fault(
    "recommenders",
    "log of the sampling probability is added to the logits where it has to be subtracted",
    thread="tensorflow/recommenders#278",
    check="loss_formula",
)
def retrieval():
    class TwoTower(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 16))
            self.candidate = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 16))

        def forward(self, user, item):
            return self.query(user) @ self.candidate(item).T

    class SamplingProbabilityCorrection(nn.Module):
        def forward(self, logits, candidate_sampling_probability):
            return logits + candidate_sampling_probability.clamp(1e-6, 1.0).log()

    data = Triples(seed=1)
    frequency = torch.bincount(data.pos, minlength=30).float() / len(data)
    model, correct = TwoTower(), SamplingProbabilityCorrection()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    def train_step(batch):
        scores = correct(model(batch["user"], batch["pos"]), frequency[batch["pos"]])
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=DataLoader(data, batch_size=8, shuffle=True),
        fit=lambda batches: [train_step(b) for b in batches],
    )


@fault(
    "recommenders",
    "the model ends in a sigmoid and BCEWithLogitsLoss takes it again",
    thread="yudi-mars/daisyRec#15",
    check="loss_contract",
)
def neural_cf():
    class NeuMF(nn.Module):
        def __init__(self, users=12, items=30, dim=8):
            super().__init__()
            self.user, self.item = nn.Embedding(users, dim), nn.Embedding(items, dim)
            self.mlp = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
            self.predict = nn.Linear(8 + dim, 1)

        def forward(self, u, i):
            pu, qi = self.user(u), self.item(i)
            h = torch.cat([pu * qi, self.mlp(torch.cat([pu, qi], -1))], -1)
            return self.predict(h).sigmoid().view(-1)

    data = Triples(seed=2)
    users = torch.cat([data.user, data.user])
    items = torch.cat([data.pos, data.neg])
    labels = torch.cat([torch.ones(len(data)), torch.zeros(len(data))])
    model = NeuMF()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss(reduction="sum")

    def fit(batches):
        model.train()
        for user, item, label in batches:
            model.zero_grad()
            prediction = model(user, item)
            loss = criterion(prediction, label)
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(users, items, labels), batch_size=16, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "recommenders",
    "the cross-entropy gets cosine and not output: the additive margin and the scale are computed and left out",
    thread="MccreeZhao/FR-Loss-on-Mnist#2",
    check="loss_formula",
)
def face_head():
    class ArcMarginProduct(nn.Module):
        def __init__(self, in_features=8, classes=6, s=16.0, m=0.3):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(classes, in_features))
            nn.init.xavier_uniform_(self.weight)
            self.s, self.cos_m, self.sin_m = s, math.cos(m), math.sin(m)
            self.th, self.mm = math.cos(math.pi - m), math.sin(math.pi - m) * m

        def forward(self, x, label):
            cosine = F.linear(F.normalize(x), F.normalize(self.weight))
            sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1))
            phi = cosine * self.cos_m - sine * self.sin_m
            phi = torch.where(cosine > self.th, phi, cosine - self.mm)
            one_hot = F.one_hot(label, cosine.shape[1]).float()
            output = self.s * (one_hot * phi + (1.0 - one_hot) * cosine)
            loss = F.cross_entropy(cosine, label)
            return loss, output

    backbone = nn.Sequential(nn.Linear(10, 24), nn.PReLU(), nn.Linear(24, 8))
    head = ArcMarginProduct()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(3)
    y = torch.randint(6, (48,), generator=g)
    x = torch.randn(6, 10, generator=g)[y] + 0.4 * torch.randn(48, 10, generator=g)

    def train(batches):
        correct = 0
        for xb, yb in batches:
            loss, output = head(backbone(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (output.argmax(1) == yb).sum().item()

    return TrainLoop(
        model={"backbone": backbone, "head": head},
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True),
        fit=train,
    )


@fault(
    "recommenders",
    "linear.weight is replaced by a new Parameter in every forward pass, and the optimizer steps the one "
    "of the beginning",
    thread="jonasgrebe/pt-femb-face-embeddings#3",
    check="optimizer_holds_every_param",
)
def margin_header():
    class CosFaceHeader(nn.Module):
        def __init__(self, in_features=8, out_features=6, s=12.0, m=0.2):
            super().__init__()
            self.linear = nn.Linear(in_features, out_features, bias=False)
            self.s, self.m = s, m

        def forward(self, x, label):
            self.linear.weight = nn.Parameter(F.normalize(self.linear.weight.detach()))
            logits = self.linear(F.normalize(x))
            return self.s * (logits - self.m * F.one_hot(label, logits.shape[1]))

    backbone = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
    header = CosFaceHeader()
    optimizer = torch.optim.AdamW([{"params": backbone.parameters()}, {"params": header.parameters()}], lr=2e-3)
    g = torch.Generator().manual_seed(4)
    y = torch.randint(6, (48,), generator=g)
    x = torch.randn(6, 10, generator=g)[y] + 0.4 * torch.randn(48, 10, generator=g)

    def train(batches):
        for xb, yb in batches:
            loss = F.cross_entropy(header(backbone(xb), yb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"backbone": backbone, "header": header},
        optimizer=optimizer,
        batches=DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True),
        fit=train,
    )


def paired(n=48, seed=5):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 6, generator=g)
    a, b = torch.randn(6, 10, generator=g), torch.randn(6, 9, generator=g)
    return TensorDataset(z @ a + 0.1 * torch.randn(n, 10, generator=g), z @ b + 0.1 * torch.randn(n, 9, generator=g))


@fault(
    "recommenders",
    "targets are a softmax of the model's own similarities, with their graph and nothing else: they can "
    "be met by collapse",
    thread="moein-shariatnia/OpenAI-CLIP#28",
    check="learnable_targets",
)
def clip_model():
    class ProjectionHead(nn.Module):
        def __init__(self, dim, out=12):
            super().__init__()
            self.projection, self.fc = nn.Linear(dim, out), nn.Linear(out, out)
            self.layer_norm = nn.LayerNorm(out)

        def forward(self, x):
            projected = self.projection(x)
            return self.layer_norm(self.fc(F.gelu(projected)) + projected)

    class CLIPModel(nn.Module):
        def __init__(self, temperature=1.0):
            super().__init__()
            self.image_projection, self.text_projection = ProjectionHead(10), ProjectionHead(9)
            self.temperature = temperature

        def forward(self, image, text):
            image, text = self.image_projection(image), self.text_projection(text)
            logits = (text @ image.T) / self.temperature
            images_similarity, texts_similarity = image @ image.T, text @ text.T
            targets = F.softmax((images_similarity + texts_similarity) / 2 * self.temperature, dim=-1)
            texts_loss = self.cross_entropy(logits, targets)
            images_loss = self.cross_entropy(logits.T, targets.T)
            return ((images_loss + texts_loss) / 2.0).mean()

        @staticmethod
        def cross_entropy(preds, targets):
            return (-targets * preds.log_softmax(dim=-1)).sum(1)

    model = CLIPModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)

    def train_epoch(batches):
        for image, text in batches:
            loss = model(image, text)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(paired(), batch_size=8, shuffle=True)
    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train_epoch)


@fault(
    "recommenders",
    "the masked diagonal becomes +inf as a distance and max always picks it as the negative: the triplet term is 0",
    thread="jinnnju/PaAno#1",
    check="every_term_trains",
)
def anomaly_triplets():
    encoder = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
    decoder = nn.Linear(8, 10)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def compute_loss(anchor, positive):
        za, zp = F.normalize(encoder(anchor), dim=1), F.normalize(encoder(positive), dim=1)
        sim = za @ zp.T
        pos_dists = 1 - sim.diagonal()
        sim_f = sim.clone()
        sim_f.diagonal().fill_(-float("inf"))
        hard_neg_dists, _ = torch.max(1 - sim_f, dim=1)
        triplet_loss = F.relu(pos_dists - hard_neg_dists + 0.5).mean()
        pretext = F.mse_loss(decoder(za), anchor)
        return triplet_loss + pretext

    def train(batches):
        for (anchor,) in batches:
            positive = anchor + 0.1 * torch.randn_like(anchor)
            loss = compute_loss(anchor, positive)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    loader = DataLoader(TensorDataset(paired(seed=6).tensors[0]), batch_size=8, shuffle=True)
    return TrainLoop(model={"encoder": encoder, "decoder": decoder}, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "recommenders",
    "y is 1 for pairs of one writer, and the loss pulls pairs with y = 0 together and pushes y = 1 apart",
    thread="VinhLoiIT/signet-pytorch#2",
    check="loss_formula",
)
def siamese():
    class ContrastiveLoss(nn.Module):
        def __init__(self, alpha=1.0, beta=1.0, margin=1.0):
            super().__init__()
            self.alpha, self.beta, self.margin = alpha, beta, margin

        def forward(self, x1, x2, y):
            distance = torch.pairwise_distance(x1, x2, p=2)
            loss = self.alpha * (1 - y) * distance**2
            loss = loss + self.beta * y * torch.clamp(self.margin - distance, min=0) ** 2
            return loss.mean()

    class PairDataset(Dataset):
        def __init__(self, n=48):
            g = torch.Generator().manual_seed(7)
            writers = torch.randn(6, 10, generator=g)
            self.first = torch.randint(6, (n,), generator=g)
            genuine = torch.rand(n, generator=g) < 0.5
            self.second = torch.where(genuine, self.first, (self.first + 1 + torch.arange(n) % 5) % 6)
            self.x1 = writers[self.first] + 0.2 * torch.randn(n, 10, generator=g)
            self.x2 = writers[self.second] + 0.2 * torch.randn(n, 10, generator=g)

        def __len__(self):
            return len(self.x1)

        def __getitem__(self, i):
            return self.x1[i], self.x2[i], (self.first[i] == self.second[i]).float()

    net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 8))
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    criterion = ContrastiveLoss()

    def train(batches):
        for x1, x2, y in batches:
            optimizer.zero_grad()
            loss = criterion(net(x1), net(x2), y)
            loss.backward()
            optimizer.step()

    loader = DataLoader(PairDataset(), batch_size=12, shuffle=True)
    return TrainLoop(model=net, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "recommenders",
    "auxiliary_loss takes the mean over all positions: the next clicks of padded ones are trained as well",
    thread="RUCAIBox/RecBole#1483",
    check="loss_formula",
)
def interest_evolution():
    class DIEN(nn.Module):
        def __init__(self, items=30, dim=12):
            super().__init__()
            self.item = nn.Embedding(items, dim, padding_idx=0)
            self.gru = nn.GRU(dim, dim, batch_first=True)
            self.auxiliary_net = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, 1))
            self.out = nn.Linear(2 * dim, 1)

        def auxiliary_loss(self, h, click, noclick):
            click_p = self.auxiliary_net(torch.cat([h, click], -1))
            noclick_p = self.auxiliary_net(torch.cat([h, noclick], -1))
            pred = torch.cat([click_p, noclick_p], 0)
            label = torch.cat([torch.ones_like(click_p), torch.zeros_like(noclick_p)], 0)
            return F.binary_cross_entropy_with_logits(pred, label)

        def forward(self, batch):
            seq, neg = self.item(batch["item_seq"]), self.item(batch["neg_seq"])
            h, _ = self.gru(seq)
            last = h.gather(1, (batch["length"] - 1).view(-1, 1, 1).expand(-1, 1, h.shape[-1])).squeeze(1)
            aux = self.auxiliary_loss(h[:, :-1], seq[:, 1:], neg[:, 1:])
            return self.out(torch.cat([last, self.item(batch["target"])], -1)).squeeze(-1), aux

    def sequences(n, rows=8, steps=9):
        g = torch.Generator().manual_seed(8)
        out = []
        for _ in range(n):
            length = torch.randint(3, steps, (rows,), generator=g)
            beyond = torch.arange(steps)[None] >= length[:, None]
            seq = torch.randint(1, 30, (rows, steps), generator=g).masked_fill(beyond, 0)
            target = torch.randint(1, 30, (rows,), generator=g)
            label = (target % 2 == seq[:, 0] % 2).float()
            neg = torch.randint(1, 30, (rows, steps), generator=g).masked_fill(beyond, 0)
            out.append({"item_seq": seq, "neg_seq": neg, "length": length, "target": target, "label": label})
        return out

    model = DIEN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches, alpha=0.5):
        for batch in batches:
            logit, aux = model(batch)
            loss = F.binary_cross_entropy_with_logits(logit, batch["label"]) + alpha * aux
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=sequences,
        fit=train,
    )
