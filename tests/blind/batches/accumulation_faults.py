"""Faulty loops about accumulation: unequal micro-batches, token counts, leftovers between calls."""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from pytest_trainloop import TrainLoop
from tests.blind.cases import fault

VOCAB = 25


class LM(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def texts(n=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, VOCAB, (int(k),), generator=generator) for k in torch.randint(3, 14, (n,), generator=generator)
    ]


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


@fault(
    "accumulation",
    "each micro-batch's loss is the mean over its own tokens, divided by the number of micro-batches: "
    "short texts weigh more",
    thread="ml-explore/mlx-lm#1413",
    check="accumulation_equivalence",
)
def default_loss(accumulate=1):
    torch.manual_seed(0)
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(batch):
        logits = model(batch["input_ids"])[:, :-1]
        targets = batch["labels"][:, 1:]
        ce = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)
        tokens = targets.ne(-100).sum()
        return ce.sum() / tokens

    def fit(batches):
        for it, batch in enumerate(batches, start=1):
            (loss_of(batch) / accumulate).backward()
            if it % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=text_loader(), fit=fit)


@fault(
    "accumulation",
    "the summed loss is divided by the tokens of the whole window and by the number of micro-batches as well",
    thread="OpenNMT/OpenNMT-py#2209",
    check="accumulation_equivalence",
)
def accum_batches(accumulate=1):
    torch.manual_seed(0)

    class Trainer:
        def __init__(self, model, optim, accum_count):
            self.model, self.optim, self.accum_count = model, optim, accum_count

        def accum_batches(self, iterator):
            window, normalization = [], 0
            for batch in iterator:
                window.append(batch)
                normalization += int(batch["labels"][:, 1:].ne(-100).sum())
                if len(window) == self.accum_count:
                    yield window, normalization
                    window, normalization = [], 0
            if window:
                yield window, normalization

        def train(self, iterator):
            for window, normalization in self.accum_batches(iterator):
                self.optim.zero_grad()
                for batch in window:
                    logits = self.model(batch["input_ids"])[:, :-1]
                    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
                    (loss / normalization / self.accum_count).backward()
                self.optim.step()

    model = LM()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), accumulate)
    return TrainLoop(model=model, optimizer=trainer.optim, batches=text_loader(seed=1), fit=trainer.train)


@fault(
    "accumulation",
    "clip_grad_norm_ runs after every micro-batch's backward, on the gradients gathered so far",
    thread="facebookresearch/lingua#59",
    check="accumulation_equivalence",
)
def train_steps(accumulate=1):
    torch.manual_seed(0)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(batches):
        for step, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y) / accumulate
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return TrainLoop(model=model, optimizer=optimizer, batches=DataLoader(points(), batch_size=8), fit=train)


@fault(
    "accumulation",
    "lr_scheduler.step() stands outside the branch of the optimizer step: the warm-up moves with every micro-batch",
    thread="EvolvingLMMs-Lab/OneVision-Encoder#82",
    check="accumulation_equivalence",
)
def video_training(accumulate=1):
    torch.manual_seed(0)
    model = classifier()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 20))

    def train(batches):
        for step, (x, y) in enumerate(batches, start=1):
            scaled_loss = F.cross_entropy(model(x), y) / accumulate
            scaled_loss.backward()
            if step % accumulate == 0:
                opt.step()
                opt.zero_grad()
            lr_scheduler.step()

    return TrainLoop(
        model=model, optimizer=opt, scheduler=lr_scheduler, batches=DataLoader(points(seed=1), batch_size=8), fit=train
    )


@fault(
    "accumulation",
    "gradients of the last, unfinished window are neither stepped nor zeroed: they enter the first step "
    "of the next epoch",
    thread="WalkingMeatAxolotl/AnimaLoraStudio#305",
    check="step_order",
)
def one_epoch(grad_accum=2):
    torch.manual_seed(0)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(points(40, seed=2), batch_size=8)

    def epoch(batches):
        model.train()
        for batch_idx, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y) / grad_accum
            loss.backward()
            if (batch_idx + 1) % grad_accum == 0:
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=loader, fit=epoch)


@fault(
    "accumulation",
    "zero_grad() is called for every micro-batch, so a step uses the last one's gradient only",
    thread="bytetriper/RAE#67",
    check="step_order",
)
def inner_loop(accumulate=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def fit(batches):
        for step, (clean, noise, t) in enumerate(batches, start=1):
            optimizer.zero_grad(set_to_none=True)
            mixed = (1 - t) * clean + t * noise
            loss = F.mse_loss(model(mixed), noise - clean) / accumulate
            loss.backward()
            if step % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()

    generator = torch.Generator().manual_seed(3)
    data = [
        (
            torch.randn(8, 8, generator=generator),
            torch.randn(8, 8, generator=generator),
            torch.rand(8, 1, generator=generator),
        )
        for _ in range(6)
    ]
    return TrainLoop(model=model, optimizer=optimizer, batches=data, fit=fit)


@fault(
    "accumulation",
    "the micro-batches' gradients are added and not divided by their number: k times the gradient of one batch",
    thread="openai/guided-diffusion#111",
    check="accumulation_equivalence",
)
def forward_backward(accumulate=1):
    torch.manual_seed(0)

    class TrainLoopUtil:
        def __init__(self, model, microbatches):
            self.model, self.microbatches = model, microbatches
            self.opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            self.ema = {name: p.detach().clone() for name, p in model.named_parameters()}

        def optimize(self):
            self.opt.step()
            self.opt.zero_grad()
            for name, p in self.model.named_parameters():
                self.ema[name].mul_(0.99).add_(p.detach(), alpha=0.01)

        def run_loop(self, batches):
            for i, (x, y) in enumerate(batches, start=1):
                F.cross_entropy(self.model(x), y).backward()
                if i % self.microbatches == 0:
                    self.optimize()

    util = TrainLoopUtil(classifier(), accumulate)
    loader = DataLoader(points(seed=4), batch_size=8)
    return TrainLoop(model=util.model, optimizer=util.opt, batches=loader, fit=util.run_loop)


@fault(
    "accumulation",
    "compute_loss takes the mean over its own tokens and ignores num_items_in_batch, and nothing divides "
    "by the steps of the window",
    thread="huggingface/transformers#37766",
    check="accumulation_equivalence",
)
def custom_trainer(accumulate=1):
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

    class TokenTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            return (loss, outputs) if return_outputs else loss

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
    trainer = TokenTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        data_collator=collator,
        train_dataset=[{"ids": row} for row in texts(seed=5)],
    )
    return from_trainer(trainer)


@fault(
    "accumulation",
    "the summed losses of a window are divided by the token count of its last micro-batch only "
    "(num_tokens is overwritten)",
    thread="karpathy/nanochat#400",
    check="accumulation_equivalence",
)
def sft_loop(accumulate=1):
    torch.manual_seed(0)
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def fit(batches):
        num_tokens = torch.tensor(1)
        for step, batch in enumerate(batches, start=1):
            targets = batch["labels"][:, 1:]
            num_tokens = targets.ne(-100).sum()
            logits = model(batch["input_ids"])[:, :-1]
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
            if step % accumulate == 0:
                for p in model.parameters():
                    p.grad /= num_tokens
                optimizer.step()
                optimizer.zero_grad()

    return TrainLoop(model=model, optimizer=optimizer, batches=text_loader(seed=6), fit=fit)


@fault(
    "accumulation",
    "a loss that is divided by the tokens of the whole window is multiplied by the number of micro-batches again",
    thread="huggingface/transformers#34198",
    check="accumulation_equivalence",
)
def token_learner(accumulate=1):
    torch.manual_seed(0)

    class Learner:
        def __init__(self):
            self.net = LM()
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.9)

        def step(self, window):
            total = sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in window)
            for batch in window:
                logits = self.net(batch["input_ids"])[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
                (loss / total * len(window)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        def fit(self, batches):
            window = []
            for batch in batches:
                window.append(batch)
                if len(window) == accumulate:
                    self.step(window)
                    window = []

    learner = Learner()
    return TrainLoop(model=learner.net, optimizer=learner.optimizer, batches=text_loader(seed=7), fit=learner.fit)


@fault(
    "accumulation",
    "the target network follows with every micro-batch, inside the window, and not once for each optimizer step",
    thread="mflux-community/mflux#447",
    check="accumulation_equivalence",
)
def momentum_teacher(accumulate=1):
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 8)) for _ in range(2))
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    predictor = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=5e-3)

    def update_teacher(momentum=0.8):
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.mul_(momentum).add_(fast.detach(), alpha=1 - momentum)

    def train(batches):
        for step, (x, y) in enumerate(batches, start=1):
            with torch.no_grad():
                goal = F.normalize(teacher(y), dim=-1)
            loss = 2 - 2 * (F.normalize(predictor(student(x)), dim=-1) * goal).sum(-1).mean()
            (loss / accumulate).backward()
            if step % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            update_teacher()

    generator = torch.Generator().manual_seed(8)
    clean = [torch.randn(8, 10, generator=generator) for _ in range(6)]
    data = [(x + 0.1 * torch.randn(8, 10, generator=generator), x) for x in clean]
    return TrainLoop(
        model={"student": student, "predictor": predictor, "teacher": teacher},
        optimizer=optimizer,
        batches=data,
        fit=train,
    )
