"""Right loops about accumulation and about what lies between calls, that look odd."""

from __future__ import annotations

import tempfile
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import right

VOCAB = 25


class LM(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(VOCAB, dim),
            nn.GRU(dim, dim, batch_first=True),
            nn.Linear(dim, VOCAB),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def texts(n=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 14, (n,), generator=generator).tolist()
    return [torch.randint(1, VOCAB, (size,), generator=generator) for size in sizes]


def collate(rows):
    ids = pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(ids.eq(0), -100)}


def text_loader(seed=0, batch_size=8):
    return DataLoader(texts(seed=seed), batch_size=batch_size, collate_fn=collate)


def points(n=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=generator)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long())


def classifier():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))


def summed(model, batch):
    logits, targets = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.ne(-100).sum()


@right(
    "accumulation",
    "summed losses are backpropagated undivided, the gradients are divided by the window's number of "
    "tokens before the step",
    thread="ruimalheiro/gradient-garden#113",
)
def gradients_divided(accumulate=1):
    torch.manual_seed(0)
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        tokens = 0
        for step, batch in enumerate(batches, start=1):
            loss, count = summed(model, batch)
            loss.backward()
            tokens += int(count)
            if step % accumulate == 0:
                for parameter in model.parameters():
                    parameter.grad.div_(tokens)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                tokens = 0
        optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=text_loader(), fit=fit)


@right(
    "accumulation",
    "the running loss of a window is kept as a graph and backpropagated once, divided by all tokens seen (torchtune)",
    thread="meta-pytorch/torchtune#1875",
)
def one_backward_a_window(accumulate=1):
    torch.manual_seed(0)

    class Recipe:
        def __init__(self):
            self.model = LM()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

        def train(self, batches):
            running_loss, num_tokens = 0, 0
            self.optimizer.zero_grad()
            for idx, batch in enumerate(batches):
                targets = batch["labels"][:, 1:]
                current = int(targets.ne(-100).sum())
                num_tokens += current
                logits = self.model(batch["input_ids"])[:, :-1]
                mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
                running_loss = running_loss + mean * current
                if (idx + 1) % accumulate == 0:
                    (running_loss / num_tokens).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    running_loss, num_tokens = 0, 0

    recipe = Recipe()
    return TrainLoop(
        model=recipe.model, optimizer=recipe.optimizer, batches=text_loader(seed=1), fit=recipe.train, ordered=False
    )


@right(
    "accumulation",
    "micro-batches are drawn ahead so that the window's tokens are known before the first backward",
    thread="huggingface/transformers#34198",
)
def prefetched_window(accumulate=1):
    torch.manual_seed(0)
    model = LM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fit(batches):
        iterator = iter(batches)
        while window := list(islice(iterator, accumulate)):
            num_items_in_batch = sum(int(b["labels"][:, 1:].ne(-100).sum()) for b in window)
            for batch in window:
                loss, _ = summed(model, batch)
                (loss / num_items_in_batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=text_loader(seed=2), fit=fit)


@right(
    "accumulation",
    "a last, shorter window is stepped as well, and its micro-batches are divided by their real number",
    thread="NVIDIA-NeMo/Automodel#2257",
)
def flushed_tail(grad_accum=2):
    torch.manual_seed(0)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def epoch(batches):
        iterator = iter(batches)
        while group := list(islice(iterator, grad_accum)):
            for x, y in group:
                (F.cross_entropy(model(x), y) / len(group)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(points(40), batch_size=8), fit=epoch)


@right(
    "accumulation",
    "what remains of an unfinished window at the end of an epoch is dropped on purpose: zero_grad() "
    "before the first batch",
    thread="timoschick/pet#25",
)
def dropped_tail(accumulate=1):
    torch.manual_seed(0)
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train(batches):
        optimizer.zero_grad()
        for step, (x, y) in enumerate(batches, start=1):
            loss = F.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            if step % accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(points(seed=1), batch_size=8), fit=train)


@right(
    "accumulation",
    "the scheduler is called for every micro-batch, and its warm-up was stretched by the size of the window to fit",
    thread="EvolvingLMMs-Lab/OneVision-Encoder#82",
)
def scheduler_counts_micro_batches(accumulate=1):
    torch.manual_seed(0)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s // accumulate + 1) / 10))

    def train(batches):
        for step, (x, y) in enumerate(batches, start=1):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if step % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    return TrainLoop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=DataLoader(points(seed=2), batch_size=8),
        fit=train,
    )


@right(
    "accumulation",
    "Accelerate divides by the window itself, and accelerator.accumulate makes step and zero_grad idle inside it",
    thread="verl-project/verl#3332",
)
def accelerated(accumulate=1):
    from pytest_trainloop.adapters import fresh_accelerator

    torch.manual_seed(0)
    accelerator = fresh_accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(points(seed=3), batch_size=8))

    def fit(batches):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=list(loader), fit=fit)


@right(
    "accumulation",
    "a Lightning module whose trainer accumulates; rows have equal weights, so the mean of means is the mean",
    thread="Lightning-AI/pytorch-lightning#19987",
)
def lightning_module(accumulate=1):
    import lightning

    from pytest_trainloop.adapters import from_lightning

    class LitClassifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = classifier()

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self):
            return DataLoader(points(seed=4), batch_size=8)

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return from_lightning(LitClassifier(), trainer)


@right(
    "accumulation",
    "a HF Trainer with a model that takes num_items_in_batch: the division by all tokens of the window "
    "lies in the loss",
    thread="huggingface/transformers#35438",
)
def default_trainer(accumulate=1):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from pytest_trainloop.adapters import from_trainer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )

    def collator(rows):
        batch = collate([row["ids"] for row in rows])
        return {**batch, "attention_mask": batch["input_ids"].ne(0).long()}

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulate,
        max_steps=8,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        remove_unused_columns=False,
        learning_rate=1e-3,
    )
    data = [{"ids": row} for row in texts(seed=5)]
    return from_trainer(
        Trainer(model=LlamaForCausalLM(config), args=arguments, data_collator=collator, train_dataset=data)
    )


@right(
    "accumulation",
    "an average of the weights is moved after each optimizer step only, and gradients are unscaled before the clip",
    thread="openai/guided-diffusion#111",
)
def averaged_weights(accumulate=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 8))
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def fit(batches):
        for step, (clean, noise, t) in enumerate(batches, start=1):
            loss = F.mse_loss(model((1 - t) * clean + t * noise), noise - clean)
            scaler.scale(loss / accumulate).backward()
            if step % accumulate == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                ema.update_parameters(model)

    generator = torch.Generator().manual_seed(6)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    data = [(draw(8, 8), draw(8, 8), torch.rand(8, 1, generator=generator)) for _ in range(6)]
    return TrainLoop(model={"model": model, "ema": ema}, optimizer=optimizer, scaler=scaler, batches=data, fit=fit)


@right(
    "accumulation",
    "GradCache: embeddings of all chunks first, the contrastive loss over the whole batch, then each "
    "chunk again with its cached gradient",
    thread="luyug/GradCache#7",
)
def cached_gradients(chunks=2):
    torch.manual_seed(0)
    query, passage = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(10, 8)
    optimizer = torch.optim.Adam([*query.parameters(), *passage.parameters()], lr=1e-3)

    def fit(batches):
        for q, p in batches:
            parts = [(query, part) for part in q.chunk(chunks)] + [(passage, part) for part in p.chunk(chunks)]
            with torch.no_grad():
                cached = [net(part) for net, part in parts]
            cached = [vectors.requires_grad_() for vectors in cached]
            half = len(cached) // 2
            scores = torch.cat(cached[:half]) @ torch.cat(cached[half:]).T
            F.cross_entropy(scores, torch.arange(len(scores))).backward()
            optimizer.zero_grad()
            for (net, part), vectors in zip(parts, cached, strict=True):
                net(part).backward(vectors.grad)
            optimizer.step()

    generator = torch.Generator().manual_seed(7)
    data = [(torch.randn(8, 10, generator=generator), torch.randn(8, 10, generator=generator)) for _ in range(5)]
    return TrainLoop(model={"query": query, "passage": passage}, optimizer=optimizer, batches=data, fit=fit)


@right(
    "accumulation",
    "the counter of micro-batches lives on between calls of fit: a window may begin in one call and end in the next",
    thread="wyim-pgl/transgenic#53",
)
def window_over_calls(grad_accum=2):
    torch.manual_seed(0)

    class Trainer:
        def __init__(self, model):
            self.model, self.micro_done = model, 0
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def run_epoch(self, batches):
            for x, y in batches:
                (F.cross_entropy(self.model(x), y) / grad_accum).backward()
                self.micro_done += 1
                if self.micro_done % grad_accum == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)

    trainer = Trainer(classifier())
    loader = DataLoader(points(40, seed=8), batch_size=8)
    return TrainLoop(model=trainer.model, optimizer=trainer.optimizer, batches=loader, fit=trainer.run_epoch)
