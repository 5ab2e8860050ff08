"""Products, losses, indexing and views of plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.calls.kinds import data, grads, kind, net

if TYPE_CHECKING:
    pass


@kind
def matmul() -> Any:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    out = a @ b
    return out, torch.mm(a, b), torch.einsum("ij,jk->ik", a, b), torch.bmm(a[None], b[None]), torch.addmm(out, a, b)


@kind
def softmax_and_cross_entropy() -> Any:
    model, (x, y) = net(), data()
    logits = model(x)
    loss = F.cross_entropy(logits, y, ignore_index=1, label_smoothing=0.1)
    loss.backward()
    return logits, logits.softmax(-1), F.log_softmax(logits, 1), loss, grads(model)


@kind
def other_losses() -> Any:
    x, y = torch.randn(5, 3, requires_grad=True), torch.rand(5, 3)
    total = (
        F.mse_loss(x, y)
        + F.l1_loss(x, y, reduction="sum")
        + F.binary_cross_entropy_with_logits(x, y)
        + F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
        + F.smooth_l1_loss(x, y)
        + F.cosine_embedding_loss(x, y, torch.ones(5))
    )
    return total, torch.autograd.grad(total, x)


@kind
def indexing() -> Any:
    x = torch.randn(5, 4, requires_grad=True)
    mask = x > 0
    picked = [x[1], x[:, ::2], x[mask], x[[0, 2]], x[..., None], x[torch.tensor([1, 1])], x.gather(1, mask.long())]
    sum(p.sum() for p in picked).backward()
    return picked, x.grad, x.where(mask, 0), x.masked_select(mask), torch.nonzero(mask), x.argmax(), x.topk(2)


@kind
def in_place() -> Any:
    x, y = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    x[1] = 5
    x[x < 0] = 0
    x.add_(1).mul_(2)
    x += y.detach()
    z = y * 2
    z.mul_(3)
    z[0].zero_()
    z.sum().backward()
    return (
        x,
        z,
        y.grad,
        x._version,
        x.clamp_(0, 1),
        x.masked_fill_(x > 0.5, 7),
        x.index_add_(0, torch.tensor([0]), x[:1].clone()),
    )


@kind
def out_arguments() -> Any:
    a, b, out = torch.randn(3, 3), torch.randn(3, 3), torch.empty(3, 3)
    values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    same = torch.add(a, b, out=out)
    torch.max(a, 1, out=(values, places))
    return same is out, out, torch.matmul(a, b, out=torch.empty(0)), values, places


@kind
def views() -> Any:
    x = torch.randn(2, 6, requires_grad=True)
    made = [
        x.view(3, 4),
        x.t(),
        x.reshape(-1)[2:],
        x.expand(3, 2, 6),
        x.unfold(1, 2, 2),
        x.as_strided((2, 2), (1, 2), 1),
        x.detach(),
        x.unsqueeze(0).permute(2, 0, 1),
        *x.split(4, 1),
        *x.unbind(1),
        x.diagonal(),
        x.narrow(1, 1, 2),
        x.contiguous(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    return made, [m._base is x for m in made]


@kind
def numbers() -> Any:
    x = torch.tensor([1.5, float("nan"), float("inf")])
    return (
        x[0].item(),
        x.tolist(),
        float(x[0]),
        int(x[0]),
        bool(x[0]),
        x.isnan(),
        x.nan_to_num(),
        x.isfinite().all().item(),
    )


@kind
def zero_dimensions() -> Any:
    x = torch.tensor(2.0, requires_grad=True)
    y = (x**2 + x.sin()).sum()
    y.backward()
    return x, y, x.grad, x.softmax(0), x.view(1), x.expand(3), torch.stack([x, y]), x.mean(), x.norm(), x.argmax()


@kind
def zero_sizes() -> Any:
    x = torch.zeros(0, 4, requires_grad=True)
    model = nn.Linear(4, 2)
    out = model(x)
    out.sum().backward()
    empty = torch.zeros(3, 0)
    return (
        *(
            out,
            x.grad,
            model.weight.grad,
            F.mse_loss(out, torch.zeros(0, 2)),
            F.cross_entropy(out, torch.zeros(0).long()),
        ),
        *(torch.cat([x, x]), x.softmax(0), x.mean(), empty.sum(1), empty @ torch.zeros(0, 2), x.tolist(), x[:, 1]),
    )


@kind
def integers_and_flags() -> Any:
    a, b = torch.arange(6).view(2, 3), torch.randint(0, 255, (2, 3), dtype=torch.uint8)
    flags = a > 2
    return (
        a.sum(),
        a @ a.t(),
        b + 1,
        b.float().mean(),
        flags.any(),
        ~flags,
        flags & (b > 9),
        a // 2,
        a.max(0),
        a.cumsum(1),
    )


@kind
def low_precision() -> Any:
    x = torch.randn(4, 4)
    made = [
        x.half(),
        x.bfloat16(),
        x.to(torch.float8_e4m3fn),
        x.to(torch.float8_e5m2),
        x.double(),
        x.to(torch.complex32),
    ]
    return made, made[0].sum(), made[1] @ made[1], made[2].float(), made[3].to(torch.float32).sum(), made[2].view(2, 8)


@kind
def complex_numbers() -> Any:
    x = torch.randn(3, 3, dtype=torch.cfloat, requires_grad=True)
    conjugate, imaginary = x.conj(), x.conj().imag
    loss = (conjugate @ x).abs().sum() + imaginary.sum()
    loss.backward()
    return (
        conjugate,
        imaginary,
        loss,
        x.grad,
        x.real,
        torch.view_as_real(x),
        torch.fft.fft(x),
        x.norm(),
        x.mH,
        x.angle(),
    )


@kind
def generators() -> Any:
    own = torch.Generator().manual_seed(5)
    drawn = torch.randn(3, generator=own), torch.randperm(5, generator=own), F.dropout(torch.ones(9), 0.5)
    return (
        drawn,
        torch.rand(2),
        torch.bernoulli(torch.full((4,), 0.5)),
        torch.multinomial(torch.ones(4), 2),
        own.get_state(),
    )
