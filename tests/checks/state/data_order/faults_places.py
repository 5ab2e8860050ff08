"""Images and their masks that are cut at two places, and correct loops that cut by several draws."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pytest_trainloop import TrainLoop
from tests.loops.odd import odd
from tests.loops.pairs import pair
from tests.loops.plain import train

SIZE = 10


def crop(image, size=SIZE):
    """At a place of its own; every second image is mirrored."""
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
    top, left = torch.randint(image.shape[-1] - size + 1, (2,)).tolist()
    return image[..., top : top + size, left : left + size]


def pictures(count, seed=0, size=14):
    """Discs in noise, and where they are."""
    draw = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"))
    centres = torch.randint(3, size - 3, (count, 2, 1, 1), generator=draw)
    masks = ((grid - centres).square().sum(1, keepdim=True) <= 9).float()
    return masks + 0.3 * torch.randn(masks.shape, generator=draw), masks


def segmenter(channels=1):
    return nn.Sequential(nn.Conv2d(channels, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))


def trained(batches, loss_of, model=None):
    model = model or segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    fit = functools.partial(train, model, optimizer, loss_of=loss_of)
    return TrainLoop(model=model, optimizer=optimizer, batches=batches, fit=fit)


class Pictures(Dataset):
    def __init__(self, augment):
        self.images, self.masks = (list(part) for part in pictures(24))
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.augment(self.images[index], self.masks[index])


def stored(augment, loss_of, kind=Pictures):
    return trained(DataLoader(kind(augment), batch_size=6, shuffle=True), loss_of)


def compared(model, batch):
    images, masks = batch
    return F.binary_cross_entropy_with_logits(model(images), masks)


# https://github.com/thuanz123/realfill/issues/4: in the data set.


class Separately(Pictures):
    def __getitem__(self, index):
        image, mask = self.images[index], self.masks[index]
        image = self.augment(image)
        mask = self.augment(mask)
        return image, mask


def two_draws(image, mask):
    image = crop(image)
    mask = crop(mask)
    return image, mask


def one_draw(image, mask):
    both = crop(torch.cat([image, mask]))
    return both[:1], both[1:]


pair(
    "image_and_mask_cropped_by_two_draws",
    "data_order",
    "labels_apart",
    culprits=("batch[0]", "batch[1]"),
    change="mask = self.augment(mask)",
    faulty=lambda: stored(crop, compared, Separately),
    fixed=lambda: stored(one_draw, compared),
)


# In the loop, with an error written by hand that the mask weighs.


def augmented(augment):
    def loss(model, batch):
        pairs = [augment(image, mask) for image, mask in zip(batch["image"], batch["mask"], strict=True)]
        images, masks = (torch.stack(part) for part in zip(*pairs, strict=True))
        return ((model(images) - 1).square() * masks + model(images).square() * (1 - masks)).mean()

    return loss


def fresh(count):
    for step in range(count):
        images, masks = pictures(6, seed=step)
        yield {"image": images, "mask": masks}


pair(
    "mask_augmented_by_its_own_draw_in_the_loop",
    "data_order",
    "labels_apart",
    culprits=("image", "mask"),
    change="mask = crop(mask)",
    faulty=lambda: trained(fresh, augmented(two_draws)),
    fixed=lambda: trained(fresh, augmented(one_draw)),
)


# Several draws that are right.


@odd(notes="an erased part, noise and brightness are drawn for the image alone: no place moves")
def places_erased_in_the_image_alone():
    def augment(image, mask):
        both = crop(torch.cat([image, mask]))
        image = both[:1] * (0.5 + torch.rand(())) + 0.1 * torch.randn(SIZE, SIZE)
        image = image * (torch.rand(SIZE, SIZE) > 0.2)
        return image, both[1:]

    return stored(augment, compared)


@odd(notes="a second crop of the image, by a draw of its own, is made to agree with nothing but itself")
def two_crops_one_of_which_has_the_mask():
    def augment(image, mask):
        return *one_draw(image, mask), crop(image)

    def loss(model, batch):
        images, masks, others = batch
        noisy = model(others + 0.1 * torch.randn_like(others))
        return compared(model, (images, masks)) + F.mse_loss(model(others), noisy.detach())

    return stored(augment, loss)


@odd(notes="the target is the middle, and an input cut at random is embedded as one vector: advice")
def a_target_at_one_place():
    class Styled(nn.Module):
        def __init__(self):
            super().__init__()
            self.style, self.paint = nn.Conv2d(1, 4, 3), nn.Parameter(torch.randn(4, 1, SIZE, SIZE) * 0.1)

        def forward(self, image):
            return torch.einsum("bc,cihw->bihw", self.style(image).mean((2, 3)), self.paint)

    def augment(image, mask):
        return crop(image), mask[..., 2 : 2 + SIZE, 2 : 2 + SIZE]

    return trained(DataLoader(Pictures(augment), batch_size=6, shuffle=True), compared, Styled())


@odd(notes="clean speech and noise are cut by two draws and added: the target is the speech alone")
def noise_cut_by_its_own_draw():
    class Mixtures(Dataset):
        def __init__(self):
            draw = torch.Generator().manual_seed(3)
            time = torch.arange(48) / 4
            self.speech = list(torch.sin(time * (1 + torch.rand(24, 1, generator=draw))))
            self.noise = list(torch.randn(24, 48, generator=draw))

        def __len__(self):
            return len(self.speech)

        def __getitem__(self, index):
            at, other = torch.randint(48 - 32 + 1, (2,)).tolist()
            speech = self.speech[index][at : at + 32]
            return (speech + 0.3 * self.noise[index][other : other + 32])[None], speech[None]

    model = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.Tanh(), nn.Conv1d(8, 1, 5, padding=2))
    return trained(DataLoader(Mixtures(), batch_size=6, shuffle=True), lambda m, b: F.l1_loss(m(b[0]), b[1]), model)
