"""Segmentation in small that is right, and looks odd."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right


def scans(n=24, classes=3, size=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    grid = torch.arange(size, dtype=torch.float32)
    images, masks = 0.1 * torch.randn(n, 1, size, size, generator=g), torch.zeros(n, size, size, dtype=torch.long)
    for k in range(1, classes):
        at = 2 + (size - 4) * torch.rand(n, 2, generator=g)
        r = 1.5 + 1.5 * torch.rand(n, generator=g)
        d = (grid[None, :, None] - at[:, 0, None, None]) ** 2 + (grid[None, None, :] - at[:, 1, None, None]) ** 2
        inside = d < r[:, None, None] ** 2
        masks[inside] = k
        images[:, 0][inside] += 1.0 if k == 1 else -1.0
    return images, masks


class MiniUNet(nn.Module):
    def __init__(self, classes=3, width=8):
        super().__init__()
        self.enc1 = nn.Conv2d(1, width, 3, padding=1)
        self.enc2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec = nn.Conv2d(2 * width, width, 3, padding=1)
        self.outc = nn.Conv2d(width, classes, 1)

    def features(self, x):
        a = F.relu(self.enc1(x))
        b = F.relu(self.enc2(a))
        return b, F.relu(self.dec(torch.cat([a, self.up(b)], 1)))

    def forward(self, x):
        return self.outc(self.features(x)[1])


def one_hot(masks, classes):
    return F.one_hot(masks, classes).permute(0, 3, 1, 2).float()


def train(model, optimizer, criterion, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()


def loop(model, criterion, data, lr=2e-3, batch_size=6, **fields):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(*data), batch_size=batch_size, shuffle=True)
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batches=loader,
        fit=lambda batches: train(model, optimizer, criterion, batches),
        **fields,
    )


@right(
    "segmentation",
    "the denominator sums squares, as in V-Net, and each class is taken over the whole batch",
    thread="HuCaoFighting/Swin-Unet#106",
)
def swin_unet_loss():
    class DiceLoss(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.n_classes = n_classes

        def _dice_loss(self, score, target):
            smooth = 1e-5
            intersect = torch.sum(score * target)
            y_sum = torch.sum(target * target)
            z_sum = torch.sum(score * score)
            return 1 - (2 * intersect + smooth) / (z_sum + y_sum + smooth)

        def forward(self, inputs, target, softmax=False):
            if softmax:
                inputs = torch.softmax(inputs, dim=1)
            target = one_hot(target, self.n_classes)
            losses = [self._dice_loss(inputs[:, i], target[:, i]) for i in range(self.n_classes)]
            return sum(losses) / self.n_classes

    ce_loss, dice_loss = nn.CrossEntropyLoss(), DiceLoss(3)
    return loop(
        MiniUNet(),
        lambda out, y: 0.4 * ce_loss(out, y) + 0.6 * dice_loss(out, y, softmax=True),
        scans(seed=0),
    )


@right(
    "segmentation",
    "batch Dice without the background: overlaps are summed over the batch before the ratio, and the loss is negative",
    thread="NifTK/NiftyNet#22; MIC-DKFZ/nnUNet batch_dice",
)
def batch_dice():
    def soft_dice(logits, y, smooth=1e-5, do_bg=False):
        x, gt = logits.softmax(1), one_hot(y, logits.shape[1])
        axes = (0, 2, 3)
        tp, fp, fn = (x * gt).sum(axes), (x * (1 - gt)).sum(axes), ((1 - x) * gt).sum(axes)
        dc = (2 * tp + smooth) / (2 * tp + fp + fn + smooth)
        return -(dc if do_bg else dc[1:]).mean()

    return loop(
        MiniUNet(),
        lambda out, y: soft_dice(out, y) + F.cross_entropy(out, y),
        scans(seed=1),
        rows_interact=True,
    )


@right(
    "segmentation",
    "the loss is log(cosh(dice loss)), as in a survey of losses; a logarithm that is no likelihood",
    thread="shruti-jadon/Semantic-Segmentation-Loss-Functions, log_cosh_dice_loss",
)
def log_cosh_dice():
    def criterion(logits, y, smooth=1.0):
        p, t = logits.sigmoid().flatten(1), (y > 0).float().flatten(1)
        dice = (2 * (p * t).sum(1) + smooth) / (p.sum(1) + t.sum(1) + smooth)
        return torch.log(torch.cosh(1 - dice)).mean()

    return loop(MiniUNet(classes=1), criterion, scans(seed=2, classes=2))


@right(
    "segmentation",
    "generalised Dice: classes are weighted by one over their squared volume in the sample, found from the labels",
    thread="Project-MONAI/MONAI GeneralizedDiceLoss; arXiv 1707.03237",
)
def generalized_dice():
    class GeneralizedDiceLoss(nn.Module):
        def __init__(self, smooth_nr=1e-5, smooth_dr=1e-5):
            super().__init__()
            self.smooth_nr, self.smooth_dr = smooth_nr, smooth_dr

        def forward(self, input, target):
            probs, target = input.softmax(1), one_hot(target, input.shape[1])
            ground_o, pred_o = target.sum((2, 3)), probs.sum((2, 3))
            intersection = (probs * target).sum((2, 3))
            w = torch.reciprocal(ground_o * ground_o)
            infs = torch.isinf(w)
            w = torch.where(infs, torch.zeros_like(w), w)
            w = w + infs * w.max(dim=1, keepdim=True).values
            numer = 2.0 * (intersection * w).sum(1) + self.smooth_nr
            denom = ((ground_o + pred_o) * w).sum(1) + self.smooth_dr
            return (1.0 - numer / denom).mean()

    return loop(MiniUNet(), GeneralizedDiceLoss(), scans(seed=3))


@right(
    "segmentation",
    "alpha weights the false negatives here and beta the false positives, and the index is raised to 1 / gamma",
    thread="ivadomed/ivadomed#256",
)
def focal_tversky():
    class FocalTverskyLoss(nn.Module):
        def __init__(self, alpha=0.7, beta=0.3, gamma=1.33, smooth=1.0):
            super().__init__()
            self.alpha, self.beta, self.gamma, self.smooth = alpha, beta, gamma, smooth

        def tversky_index(self, y_pred, y_true):
            tp = torch.sum(y_true * y_pred)
            fn = torch.sum(y_true * (1 - y_pred))
            fp = torch.sum((1 - y_true) * y_pred)
            return (tp + self.smooth) / (tp + self.alpha * fn + self.beta * fp + self.smooth)

        def forward(self, input, target):
            target = one_hot(target, input.shape[1])
            input = input.softmax(1)
            total = 0.0
            for i in range(input.shape[1]):
                total = total + (1 - self.tversky_index(input[:, i], target[:, i])) ** (1 / self.gamma)
            return total / input.shape[1]

    return loop(MiniUNet(), FocalTverskyLoss(), scans(seed=4))


@right(
    "segmentation",
    "the smoothing stands in the denominator only, and the masks of the instances are summed with squares",
    thread="aim-uofa/AdelaiDet#610",
)
def condinst_dice():
    def dice_coefficient(x, target, eps=1e-5):
        x, target = x.reshape(len(x), -1), target.reshape(len(x), -1)
        intersection = (x * target).sum(dim=1)
        union = (x**2.0).sum(dim=1) + (target**2.0).sum(dim=1) + eps
        return 1.0 - (2 * intersection / union)

    return loop(
        MiniUNet(classes=1),
        lambda out, y: dice_coefficient(out.sigmoid(), (y > 0).float()).mean(),
        scans(seed=5, classes=2),
    )


@right(
    "segmentation",
    "exp is taken before the Dice since the network ends in log_softmax, which nll_loss takes as well",
    thread="Jiaxuan-Li/MGU-Net#3",
)
def nll_and_dice():
    class Net(MiniUNet):
        def forward(self, x):
            return F.log_softmax(super().forward(x), dim=1)

    class DiceLoss(nn.Module):
        def forward(self, input, target, weight=None):
            input = torch.exp(input)
            encoded = one_hot(target, input.shape[1])
            inter = (input * encoded).sum((2, 3))
            union = input.sum((2, 3)) + encoded.sum((2, 3))
            loss = 1 - (2 * inter + 1) / (union + 1)
            return loss.mean() if weight is None else (loss * weight).sum() / weight.sum() / len(loss)

    nll, dice = nn.NLLLoss(weight=torch.tensor([0.5, 1.0, 1.5])), DiceLoss()
    return loop(Net(), lambda out, y: nll(out, y) + dice(out, y), scans(seed=6))


def signed_distance(masks):
    """Distance to the other region: negative within, positive outside."""
    size = masks.shape[-1]
    at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"), -1).flatten(0, 1).float()
    d = torch.cdist(at, at)
    out = []
    for m in masks.flatten(1).bool():
        outside = d[:, m].min(1).values
        inside = d[:, ~m].min(1).values
        out.append(torch.where(m, 1 - inside, outside).view(size, size))
    return torch.stack(out)


@right(
    "segmentation",
    "the boundary term is the mean of probabilities times a signed distance map, may be negative, and gains weight",
    thread="LIVIAETS/boundary-loss",
)
def boundary_loss():
    images, masks = scans(seed=7, classes=2)
    data = TensorDataset(images, masks, signed_distance(masks))
    model = MiniUNet(classes=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    class Trainer:
        def __init__(self, alpha=0.01, step=0.01):
            self.alpha, self.step = alpha, step

        def fit(self, batches):
            for x, y, dist in batches:
                probs = model(x).softmax(1)
                target = one_hot(y, 2)
                inter = (probs * target).sum((2, 3))
                gdl = 1 - 2 * (inter.sum(1) + 1e-10) / (probs.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1e-10)
                boundary = (probs[:, 1] * dist).mean()
                loss = (1 - self.alpha) * gdl.mean() + self.alpha * boundary
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.alpha = min(self.alpha + self.step, 0.99)

    return TrainLoop(
        model=model, optimizer=optimizer, batches=DataLoader(data, batch_size=6), fit=lambda b: Trainer().fit(b)
    )


@right(
    "segmentation",
    "deep supervision halves the weight of each lower resolution; labels of these are taken by nearest neighbour",
    thread="MIC-DKFZ/nnUNet, DeepSupervisionWrapper",
)
def deep_supervision():
    class DeepUNet(MiniUNet):
        def __init__(self):
            super().__init__()
            self.aux = nn.Conv2d(16, 3, 1)

        def forward(self, x):
            low, high = self.features(x)
            return [self.outc(high), self.aux(low)]

    class DeepSupervisionWrapper(nn.Module):
        def __init__(self, loss, weight_factors):
            super().__init__()
            self.loss, self.weight_factors = loss, weight_factors

        def forward(self, outputs, target):
            targets = [target, F.interpolate(target[:, None].float(), scale_factor=0.5, mode="nearest")[:, 0].long()]
            pairs = zip(self.weight_factors, outputs, targets, strict=True)
            return sum(w * self.loss(o, t) for w, o, t in pairs if w != 0)

    weights = torch.tensor([1.0, 0.5])
    criterion = DeepSupervisionWrapper(nn.CrossEntropyLoss(), (weights / weights.sum()).tolist())
    return loop(DeepUNet(), criterion, scans(seed=8))


@right(
    "segmentation",
    "pixels of 255 are clamped to the last class, and both prediction and target are masked there",
    thread="PaddlePaddle/PaddleSeg#2270",
)
def dice_and_ignored():
    images, masks = scans(seed=9)
    g = torch.Generator().manual_seed(9)
    masks[torch.rand(masks.shape, generator=g) < 0.2] = 255

    class DiceLoss(nn.Module):
        def __init__(self, ignore_index=255, smooth=1.0):
            super().__init__()
            self.ignore_index, self.smooth = ignore_index, smooth

        def forward(self, logits, labels):
            probs = F.softmax(logits, dim=1)
            mask = (labels != self.ignore_index).unsqueeze(1).float()
            target = one_hot(labels.clamp(max=logits.shape[1] - 1), logits.shape[1])
            probs, target = probs * mask, target * mask
            inter = (probs * target).sum((2, 3))
            card = (probs + target).sum((2, 3))
            return (1 - (2 * inter + self.smooth) / (card + self.smooth)).mean()

    ce, dice = nn.CrossEntropyLoss(ignore_index=255), DiceLoss()
    return loop(MiniUNet(), lambda out, y: ce(out, y) + dice(out, y), (images, masks))


@right(
    "segmentation",
    "only the hardest pixels of the batch are trained: those above a threshold, or a sixteenth at least",
    thread="CoinCheung/BiSeNet, OhemCELoss",
)
def ohem():
    class OhemCELoss(nn.Module):
        def __init__(self, thresh=0.7, ignore_lb=255):
            super().__init__()
            self.thresh = -torch.log(torch.tensor(thresh))
            self.ignore_lb = ignore_lb
            self.criteria = nn.CrossEntropyLoss(ignore_index=ignore_lb, reduction="none")

        def forward(self, logits, labels):
            n_min = labels[labels != self.ignore_lb].numel() // 16
            loss = self.criteria(logits, labels).view(-1)
            loss_hard = loss[loss > self.thresh]
            if loss_hard.numel() < n_min:
                loss_hard, _ = loss.topk(n_min)
            return torch.mean(loss_hard)

    return loop(MiniUNet(), OhemCELoss(), scans(seed=10), rows_interact=True)


@right(
    "segmentation",
    "the Lovasz hinge takes logits as they are, with signs of labels, and sorts errors of each image",
    thread="bermanmaxim/LovaszSoftmax, lovasz_hinge",
)
def lovasz_hinge():
    def lovasz_grad(gt_sorted):
        gts = gt_sorted.sum()
        intersection = gts - gt_sorted.cumsum(0)
        union = gts + (1 - gt_sorted).cumsum(0)
        jaccard = 1.0 - intersection / union
        return torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])

    def lovasz_hinge_flat(logits, labels):
        signs = 2.0 * labels.float() - 1.0
        errors = 1.0 - logits * signs
        errors_sorted, perm = torch.sort(errors, dim=0, descending=True)
        grad = lovasz_grad(labels[perm].float())
        return torch.dot(F.elu(errors_sorted) + 1, grad)

    def criterion(logits, labels):
        per_image = [
            lovasz_hinge_flat(lo.view(-1), la.view(-1)) for lo, la in zip(logits, (labels > 0).long(), strict=True)
        ]
        return torch.stack(per_image).mean()

    return loop(MiniUNet(classes=1), criterion, scans(seed=11, classes=2))


@right(
    "segmentation",
    "regions overlap (whole within core), so that each channel has its own sigmoid and targets sum to more than 1",
    thread="MIC-DKFZ/nnUNet region-based training (BraTS)",
)
def nested_regions():
    def regions(y):
        return torch.stack([(y > 0).float(), (y == 2).float()], 1)

    def criterion(logits, y):
        t, p = regions(y), logits.sigmoid()
        inter = (p * t).sum((2, 3))
        dice = (2 * inter + 1e-5) / (p.sum((2, 3)) + t.sum((2, 3)) + 1e-5)
        return F.binary_cross_entropy_with_logits(logits, t) - dice.mean()

    return loop(MiniUNet(classes=2), criterion, scans(seed=12))


@right(
    "segmentation",
    "pixel-wise distillation: softmax over dim 1 after permute and view brought the classes there; frozen teacher",
    thread="irfanICMLL/structure_knowledge_distillation#60",
)
def pixelwise_kd():
    student = MiniUNet(width=4)
    teacher = nn.Conv2d(1, 3, 1).eval().requires_grad_(False)
    teacher.load_state_dict(
        {"weight": torch.tensor([0.0, 6.0, -6.0]).view(3, 1, 1, 1), "bias": torch.tensor([3.0, 0.0, 0.0])}
    )
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(*scans(seed=13)), batch_size=6)

    def criterion_pixel_wise(preds_s, preds_t):
        _, c, h, w = preds_s.shape
        soft_t = F.softmax(preds_t.permute(0, 2, 3, 1).contiguous().view(-1, c), dim=1)
        log_s = F.log_softmax(preds_s.permute(0, 2, 3, 1).contiguous().view(-1, c), dim=1)
        return torch.sum(-soft_t * log_s) / w / h / len(preds_s)

    def fit(batches):
        student.train()
        for x, y in batches:
            with torch.no_grad():
                preds_t = teacher(x)
            preds_s = student(x)
            loss = F.cross_entropy(preds_s, y) + 0.5 * criterion_pixel_wise(preds_s, preds_t.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(
        model={"student": student, "teacher": teacher},
        optimizer=optimizer,
        batches=loader,
        fit=fit,
        frozen=("teacher.",),
    )


@right(
    "segmentation",
    "a Lightning module: cross-entropy with weights beside a Dice of foreground classes that leaves absent ones out",
    thread="Lightning-AI/pytorch-lightning#2791",
)
def lit_dice_ce():
    import lightning

    from pytest_trainloop.adapters import from_lightning

    class LitUNet(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = MiniUNet()
            self.register_buffer("class_weights", torch.tensor([0.3, 1.0, 1.0]))

        def dice_loss(self, logits, y):
            probs, target = logits.softmax(1)[:, 1:], one_hot(y, logits.shape[1])[:, 1:]
            present = (target.sum((2, 3)) > 0).float()
            dice = (2 * (probs * target).sum((2, 3)) + 1) / (probs.sum((2, 3)) + target.sum((2, 3)) + 1)
            return ((1 - dice) * present).sum() / present.sum().clamp(min=1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            logits = self.model(x)
            return F.cross_entropy(logits, y, self.class_weights) + self.dice_loss(logits, y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=2e-3)

        def train_dataloader(self):
            return DataLoader(TensorDataset(*scans(seed=14)), batch_size=6)

    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return from_lightning(LitUNet(), trainer)


@right(
    "segmentation",
    "the lowest of three outputs has the weight 0 by design, and its head stays as it is; the others share 1",
    thread="MIC-DKFZ/nnUNet#329",
)
def lowest_output_unused():
    class DeepUNet(MiniUNet):
        def __init__(self):
            super().__init__()
            self.mid_head, self.low_head = nn.Conv2d(16, 3, 1), nn.Conv2d(16, 3, 1)

        def forward(self, x):
            low, high = self.features(x)
            return [self.outc(high), self.mid_head(low), self.low_head(F.avg_pool2d(low, 2))]

    weights = torch.tensor([1 / 2**i for i in range(3)])
    weights[-1] = 0
    weights = (weights / weights.sum()).tolist()

    def criterion(outputs, y):
        targets = [y, y[:, ::2, ::2], y[:, ::4, ::4]]
        return sum(w * F.cross_entropy(o, t) for w, o, t in zip(weights, outputs, targets, strict=True) if w != 0)

    return loop(DeepUNet(), criterion, scans(seed=15))
