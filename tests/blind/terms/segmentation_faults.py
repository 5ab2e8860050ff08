"""Segmentation in small, from public threads."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault


def scans(n=24, classes=3, size=12, seed=0):
    """Images with one bright blob (class 1) and one dark blob (class 2) each."""
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

    def forward(self, x):
        a = F.relu(self.enc1(x))
        b = F.relu(self.enc2(a))
        return self.outc(F.relu(self.dec(torch.cat([a, self.up(b)], 1))))


class Scans(Dataset):
    def __init__(self, **kwargs):
        self.images, self.masks = scans(**kwargs)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {"image": self.images[i], "mask": self.masks[i]}


def one_hot(masks, classes):
    return F.one_hot(masks, classes).permute(0, 3, 1, 2).float()


@fault(
    "segmentation",
    "the numerator squares net_output * gt while the denominator is not squared",
    thread="MIC-DKFZ/nnUNet#12",
    check="loss_formula",
)
def soft_dice_and_ce():
    model = MiniUNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.99, nesterov=True, weight_decay=3e-5)
    loader = DataLoader(TensorDataset(*scans()), batch_size=6, shuffle=True)

    def soft_dice(net_output, gt, smooth=1.0, smooth_in_nom=1.0, square_nominator=False, square_denom=False):
        axes = tuple(range(2, net_output.dim()))
        product = net_output * gt
        intersect = product.sum(axes) if square_nominator else (product**2).sum(axes)
        denom = (net_output**2 + gt**2).sum(axes) if square_denom else (net_output + gt).sum(axes)
        return (-((2 * intersect + smooth_in_nom) / (denom + smooth))).mean()

    class SoftDiceCE(nn.Module):
        def forward(self, net_output, target):
            dice = soft_dice(net_output.softmax(1), one_hot(target, net_output.shape[1]))
            return dice + F.cross_entropy(net_output, target)

    loss_fn = SoftDiceCE()

    def run_training(batches):
        model.train()
        for data, target in batches:
            optimizer.zero_grad()
            loss = loss_fn(model(data), target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 12)
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=run_training)


@fault(
    "segmentation",
    "jaccard=True subtracts the intersection from the denominator and leaves the factor 2 in the numerator",
    thread="Project-MONAI/MONAI#644",
    check="loss_formula",
)
def monai_dice():
    class DiceLoss(nn.Module):
        def __init__(self, sigmoid=False, softmax=False, jaccard=False, smooth=1e-5):
            super().__init__()
            self.sigmoid, self.softmax, self.jaccard, self.smooth = sigmoid, softmax, jaccard, smooth

        def forward(self, input, target):
            if self.sigmoid:
                input = torch.sigmoid(input)
            if self.softmax:
                input = torch.softmax(input, 1)
            axis = list(range(2, input.dim()))
            intersection = torch.sum(target * input, dim=axis)
            denominator = torch.sum(target, dim=axis) + torch.sum(input, dim=axis)
            if self.jaccard:
                denominator = denominator - intersection
            f = 1.0 - (2.0 * intersection + self.smooth) / (denominator + self.smooth)
            return f.mean()

    model = MiniUNet()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss_function = DiceLoss(softmax=True, jaccard=True)
    loader = DataLoader(Scans(seed=1), batch_size=6)

    def train(batches):
        for batch_data in batches:
            inputs, labels = batch_data["image"], batch_data["mask"]
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = loss_function(outputs, one_hot(labels, 3))
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "segmentation",
    "the soft Dice takes probabilities, and apply_nonlin is None: it gets the logits",
    thread="ScrollPrize/villa#1644",
    check="loss_contract",
)
def memory_efficient_dice():
    class MemoryEfficientSoftDiceLoss(nn.Module):
        def __init__(self, apply_nonlin=None, batch_dice=False, smooth=1.0):
            super().__init__()
            self.apply_nonlin, self.batch_dice, self.smooth = apply_nonlin, batch_dice, smooth

        def forward(self, x, y):
            if self.apply_nonlin is not None:
                x = self.apply_nonlin(x)
            axes = (2, 3)
            intersect = (x * y).sum(axes)
            sum_pred, sum_gt = x.sum(axes), y.sum(axes)
            dc = (2 * intersect + self.smooth) / torch.clip(sum_gt + sum_pred + self.smooth, 1e-8)
            return -dc.mean()

    def create_loss(name):
        return {
            "BCEWithLogitsLoss": nn.BCEWithLogitsLoss,
            "MemoryEfficientSoftDiceLoss": MemoryEfficientSoftDiceLoss,
        }[name]()

    model = MiniUNet(classes=1)
    nn.init.constant_(model.outc.bias, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, masks = scans(seed=2, classes=2)
    loader = DataLoader(TensorDataset(images, (masks == 1).float()[:, None]), batch_size=6)
    losses = {"BCEWithLogitsLoss": 1.0, "MemoryEfficientSoftDiceLoss": 0.5}
    losses = [(create_loss(name), weight) for name, weight in losses.items()]

    def fit(batches):
        model.train()
        for x, y in batches:
            out = model(x)
            total = sum(w * fn(out, y) for fn, w in losses)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "segmentation",
    "DiceLoss takes the softmax, and BinaryDiceLoss a sigmoid of it: the probabilities lie between 0.5 and 0.73",
    thread="Hsuxu/Loss_ToolBox-PyTorch#11",
    check="loss_contract",
)
def multiclass_dice():
    class BinaryDiceLoss(nn.Module):
        def __init__(self, smooth=1.0, p=2):
            super().__init__()
            self.smooth, self.p = smooth, p

        def forward(self, output, target):
            output = torch.sigmoid(output).flatten(1)
            target = target.flatten(1)
            num = (output * target).sum(1) * 2 + self.smooth
            den = (output.pow(self.p) + target.pow(self.p)).sum(1) + self.smooth
            return (1 - num / den).mean()

    class DiceLoss(nn.Module):
        def __init__(self, weight=None, ignore_index=None):
            super().__init__()
            self.weight, self.ignore_index = weight, ignore_index or []
            self.dice = BinaryDiceLoss()

        def forward(self, output, target):
            output = F.softmax(output, dim=1)
            total = 0
            for i in range(target.shape[1]):
                if i not in self.ignore_index:
                    total = total + self.dice(output[:, i], target[:, i])
            return total / (target.size(1) - len(self.ignore_index))

    model = MiniUNet()
    criterion = DiceLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(*scans(seed=3)), batch_size=6)

    def train(batches):
        for image, label in batches:
            loss = criterion(model(image), one_hot(label, 3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "segmentation",
    "pixels of 255 become class 0 in the one-hot target, and the mask multiplies the target only, not the prediction",
    thread="open-mmlab/mmsegmentation#2996",
    check="loss_formula",
)
def dice_with_ignored():
    model = MiniUNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, masks = scans(seed=4)
    g = torch.Generator().manual_seed(4)
    masks[torch.rand(masks.shape, generator=g) < 0.25] = 255
    loader = DataLoader(TensorDataset(images, masks), batch_size=6)

    def binary_dice_loss(pred, target, valid_mask, smooth=1.0, exponent=2):
        pred, target = pred.flatten(1), target.flatten(1)
        valid_mask = valid_mask.flatten(1)
        num = torch.sum(pred * target * valid_mask, dim=1) * 2 + smooth
        den = torch.sum(pred.pow(exponent) + target.pow(exponent) * valid_mask, dim=1) + smooth
        return (1 - num / den).mean()

    def dice_loss(logits, label, ignore_index=255):
        pred = logits.softmax(1)
        target = F.one_hot(label.clamp(0, logits.shape[1] - 1), logits.shape[1])
        valid_mask = (label != ignore_index).long()
        total = sum(binary_dice_loss(pred[:, i], target[..., i], valid_mask) for i in range(pred.shape[1]))
        return total / pred.shape[1]

    def fit(batches):
        for x, y in batches:
            out = model(x)
            loss = F.cross_entropy(out, y, ignore_index=255) + 3.0 * dice_loss(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "segmentation",
    "softmax runs over the width (dim -1) of (B, C, H, W) before the Dice over classes",
    thread="hfslyc/AdvSemiSeg#73",
    check="loss_contract",
)
def dice_of_maps():
    model = MiniUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(*scans(seed=5)), batch_size=6, shuffle=True)
    softmax = nn.Softmax(dim=-1)

    def dice_coeff(pred, target, epsilon=1e-6):
        inter = 2 * (pred * target).sum((-1, -2))
        sets_sum = pred.sum((-1, -2)) + target.sum((-1, -2))
        return ((inter + epsilon) / (sets_sum + epsilon)).mean()

    def train(batches):
        for images, true_masks in batches:
            masks_pred = softmax(model(images))
            loss = 1 - dice_coeff(masks_pred, one_hot(true_masks, 3))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "segmentation",
    "one_hot gives (N, H, W, C), and view(N, C, H, W) renames the axes without moving them",
    thread="yihong-97/Source-free-IAPC#5",
    check="loss_contract",
)
def jaccard_training():
    model = MiniUNet(classes=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(*scans(seed=6, classes=4)), batch_size=6)

    def jaccard_loss(true, logits, eps=1e-7):
        num_classes = logits.shape[1]
        true_1_hot = torch.eye(num_classes)[true]
        true_1_hot = true_1_hot.view(logits.shape).type(logits.dtype)
        probas = F.softmax(logits, dim=1)
        dims = (0, 2, 3)
        intersection = torch.sum(probas * true_1_hot, dims)
        cardinality = torch.sum(probas + true_1_hot, dims)
        union = cardinality - intersection
        return 1 - (intersection / (union + eps)).mean()

    def fit(batches):
        for x, y in batches:
            loss = jaccard_loss(y, model(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "segmentation",
    "the prediction is thresholded before the Dice: (probs > threshold) has no gradient, only the BCE trains",
    thread="qubvel-org/segmentation_models.pytorch#611",
    check="every_term_trains",
)
def smp_train_epoch():
    class DiceLoss(nn.Module):
        def __init__(self, eps=1.0, threshold=None):
            super().__init__()
            self.eps, self.threshold = eps, threshold

        def forward(self, y_pr, y_gt):
            y_pr = torch.sigmoid(y_pr)
            if self.threshold is not None:
                y_pr = (y_pr > self.threshold).type(y_pr.dtype)
            tp = torch.sum(y_gt * y_pr)
            fp = torch.sum(y_pr) - tp
            fn = torch.sum(y_gt) - tp
            return 1 - (2 * tp + self.eps) / (2 * tp + fn + fp + self.eps)

    model = MiniUNet(classes=1)
    optimizer = torch.optim.Adam([{"params": model.parameters(), "lr": 1e-3}])
    images, masks = scans(seed=7, classes=2)
    loader = DataLoader(TensorDataset(images, (masks > 0).float()[:, None]), batch_size=6)
    bce, dice = nn.BCEWithLogitsLoss(), DiceLoss(threshold=0.5)

    class TrainEpoch:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def batch_update(self, x, y):
            self.optimizer.zero_grad()
            prediction = self.model(x)
            loss = bce(prediction, y) + dice(prediction, y)
            loss.backward()
            self.optimizer.step()
            return loss.item()

        def run(self, dataloader):
            self.model.train()
            return [self.batch_update(x, y) for x, y in dataloader]

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=TrainEpoch(model, optimizer).run)


@fault(
    "segmentation",
    "dice_loss returns the coefficient itself, not 1 minus it: the overlap is minimised",
    thread="sraashis/easytorch#38",
    check="loss_contract",
)
def easytorch_iteration():
    model = MiniUNet(classes=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, masks = scans(seed=8, classes=2)
    loader = DataLoader(TensorDataset(images, masks), batch_size=6)

    def dice_loss(outputs=None, target=None, beta=1, weights=None):
        smooth = 1e-6
        outputs, target = outputs.reshape(-1).float(), target.reshape(-1).float()
        if weights is not None:
            weights = weights.contiguous().float()
        intersection = (outputs * target).sum()
        return (2.0 * intersection + smooth) / (outputs.sum() + target.sum() + smooth)

    def iteration(batch):
        inputs, labels = batch
        out = F.log_softmax(model(inputs), 1)
        return dice_loss(torch.exp(out[:, 1]), labels)

    def fit(batches):
        for batch in batches:
            optimizer.zero_grad()
            iteration(batch).backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "segmentation",
    "probas.view(-1, C) flattens (B, C, H, W) without moving the classes last: rows are pixels of one class",
    thread="qubvel-org/segmentation_models.pytorch#461",
    check="loss_contract",
)
def lovasz_softmax():
    def lovasz_grad(gt_sorted):
        gts = gt_sorted.sum()
        intersection = gts - gt_sorted.cumsum(0)
        union = gts + (1 - gt_sorted).cumsum(0)
        jaccard = 1.0 - intersection / union
        return torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])

    def flatten_probas(probas, labels):
        classes = probas.size(1)
        return probas.contiguous().view(-1, classes), labels.view(-1)

    def lovasz_softmax_flat(probas, labels):
        losses = []
        for c in labels.unique():
            fg = (labels == c).float()
            errors = (fg - probas[:, c]).abs()
            errors_sorted, perm = torch.sort(errors, 0, descending=True)
            losses.append(torch.dot(errors_sorted, lovasz_grad(fg[perm])))
        return torch.stack(losses).mean()

    model = MiniUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(*scans(seed=9)), batch_size=6)

    def train(batches):
        for x, y in batches:
            loss = lovasz_softmax_flat(*flatten_probas(model(x).softmax(1), y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=train)


@fault(
    "segmentation",
    "the Jaccard distance is that of the prediction to its own rounding: y_true does not enter",
    thread="keras-team/keras-contrib#197",
    check="loss_formula",
)
def jaccard_distance_head():
    model = MiniUNet(classes=1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    images, masks = scans(seed=10, classes=2)
    loader = DataLoader(TensorDataset(images, (masks == 1).float()), batch_size=6)

    def jaccard_distance(y_true, y_pred, smooth=1.0):
        intersection = (y_true * y_pred).abs().sum((-1, -2))
        total = (y_true.abs() + y_pred.abs()).sum((-1, -2))
        return 1 - (intersection + smooth) / (total - intersection + smooth)

    def binary_jaccard_distance(y_true, y_pred, smooth=1.0):
        return jaccard_distance(torch.round(y_pred), y_pred, smooth)

    def fit(batches):
        for x, y in batches:
            y_pred = model(x).squeeze(1).sigmoid()
            loss = F.binary_cross_entropy(y_pred, y) + binary_jaccard_distance(y, y_pred).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


@fault(
    "segmentation",
    "the Dice term is of argmax labels, through which no gradient passes, and adds a constant to the cross-entropy",
    thread="tensorlayer/TensorLayer#891",
    check="every_term_trains",
)
def lit_segmentation():
    import lightning

    from pytest_trainloop.adapters import from_lightning

    class SegmentationModel(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = MiniUNet()

        def dice(self, pred, y):
            pred, y = one_hot(pred, 3), one_hot(y, 3)
            inter = (pred * y).sum((2, 3))
            return (2 * inter + 1) / (pred.sum((2, 3)) + y.sum((2, 3)) + 1)

        def training_step(self, batch, batch_idx):
            logits = self.model(batch["image"])
            pred = logits.argmax(1)
            return F.cross_entropy(logits, batch["mask"]) + (1 - self.dice(pred, batch["mask"]).mean())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self):
            return DataLoader(Scans(seed=11), batch_size=6)

    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return from_lightning(SegmentationModel(), trainer)


@fault(
    "segmentation",
    "only x[-1], the lowest output, enters the loss; the head of the full resolution gets no gradient",
    thread="MrGiovanni/UNetPlusPlus#75",
    check="gradient_reaches_every_param",
)
def deep_supervision():
    class DeepUNet(MiniUNet):
        def __init__(self):
            super().__init__()
            self.low_head = nn.Conv2d(16, 3, 1)

        def forward(self, x):
            a = F.relu(self.enc1(x))
            b = F.relu(self.enc2(a))
            high = self.outc(F.relu(self.dec(torch.cat([a, self.up(b)], 1))))
            low = F.interpolate(self.low_head(b), scale_factor=2, mode="bilinear")
            return high, low

    class MultipleOutputLoss2(nn.Module):
        def __init__(self, loss, weight_factors=None):
            super().__init__()
            self.loss, self.weight_factors = loss, weight_factors

        def forward(self, x, y):
            assert isinstance(x, (tuple, list)), "x must be either tuple or list"
            weights = [1] * len(x) if self.weight_factors is None else self.weight_factors
            return weights[0] * self.loss(x[-1], y)

    model = DeepUNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = MultipleOutputLoss2(nn.CrossEntropyLoss(), [2 / 3, 1 / 3])
    loader = DataLoader(TensorDataset(*scans(seed=12)), batch_size=6)

    def fit(batches):
        for x, y in batches:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)


def distance_maps(masks):
    """Distance to the other region, of each pixel."""
    size = masks.shape[-1]
    at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"), -1).flatten(0, 1).float()
    d = torch.cdist(at, at)
    out = [torch.where(m, d[:, ~m].min(1).values, d[:, m].min(1).values) for m in masks.flatten(1).bool()]
    return torch.stack(out).view(masks.shape)


@fault(
    "segmentation",
    "SurfaceLoss takes (probs, dist_maps, _) and is called with (probs, labels, dist_maps): it multiplies the labels",
    thread="LIVIAETS/boundary-loss#13",
    check="loss_formula",
)
def surface_loss():
    class GeneralizedDice:
        def __call__(self, probs, target, _):
            pc, tc = probs, one_hot(target, 2)
            w = 1 / (tc.sum((2, 3)) + 1e-10) ** 2
            inter = (w * (pc * tc).sum((2, 3))).sum(1)
            union = (w * (pc.sum((2, 3)) + tc.sum((2, 3)))).sum(1)
            return (1 - 2 * (inter + 1e-10) / (union + 1e-10)).mean()

    class SurfaceLoss:
        def __call__(self, probs, dist_maps, _):
            return (probs[:, 1] * dist_maps.float()).mean()

    model = MiniUNet(classes=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, masks = scans(seed=13, classes=2)
    distances = distance_maps(masks)
    signed = torch.where(masks.bool(), 1 - distances, distances)
    loader = DataLoader(TensorDataset(images, masks, signed), batch_size=6)
    loss_fns, loss_weights = [GeneralizedDice(), SurfaceLoss()], [1.0, 0.5]

    def do_epoch(batches):
        model.train()
        for image, labels, bounds in batches:
            optimizer.zero_grad()
            pred_probs = F.softmax(5 * model(image), dim=1)
            loss = sum(w * fn(pred_probs, labels, bounds) for w, fn in zip(loss_weights, loss_fns, strict=True))
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=do_epoch)


@fault(
    "segmentation",
    "the distance map of the boundary term is not signed: probability is penalised inside the object as well",
    thread="JunMa11/SegLossOdyssey#37",
    check="loss_formula",
)
def boundary_term():
    model = MiniUNet(classes=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, masks = scans(seed=14, classes=2)
    loader = DataLoader(TensorDataset(images, masks, distance_maps(masks)), batch_size=6)

    def boundary_loss(outputs_soft, gt_sdf):
        return (outputs_soft[:, 1] * gt_sdf).mean()

    def fit(batches, alpha=0.3):
        for x, y, sdf in batches:
            logits = model(x)
            soft = logits.softmax(1)
            loss = (1 - alpha) * F.cross_entropy(logits, y) + alpha * boundary_loss(soft, sdf)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=fit)
