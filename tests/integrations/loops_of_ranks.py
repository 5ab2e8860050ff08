"""Loops of frameworks on several ranks: right ones, and faulty ones with the cause that each must be named with."""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from pytest_trainloop import TrainLoop
from pytest_trainloop.adapters import fresh_accelerator, from_lightning, from_trainer
from tests.loops import data, nets

# --- Hugging Face Trainer


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nets.mlp(6, 16, 3)

    def forward(self, x, labels=None):
        scores = self.body(x)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


class Points(Dataset):
    def __init__(self):
        self.x, self.y = data.labelled(rows=32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


def arguments(accumulate, **options):
    import transformers

    return transformers.TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )


def trainer_of_classifier(accumulate=1, ranks=1):
    import transformers

    args = arguments(accumulate)
    assert args.world_size == ranks
    return from_trainer(transformers.Trainer(model=Classifier(), args=args, train_dataset=Points()))


class Texts(Dataset):
    """Texts of 3 to 12 tokens, padded: the numbers of targets differ."""

    def __init__(self):
        self.ids, _ = data.tokens(rows=32)
        lengths = torch.tensor([3, 12, 5, 9, 4, 11, 6, 10] * 4)
        self.mask = (torch.arange(self.ids.shape[1]) < lengths[:, None]).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        mask = self.mask[index]
        return {
            "input_ids": self.ids[index],
            "attention_mask": mask,
            "labels": self.ids[index].masked_fill(mask == 0, -100),
        }


def language_model():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=16, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def trainer_of_language_model(accumulate=1, ranks=1):
    import transformers

    return from_trainer(transformers.Trainer(model=language_model(), args=arguments(accumulate), train_dataset=Texts()))


def trainer_with_adapters(accumulate=1, ranks=1):
    import peft
    import transformers

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = peft.get_peft_model(language_model(), config)
    return from_trainer(transformers.Trainer(model=model, args=arguments(accumulate), train_dataset=Texts()))


def trainer_past_the_wrapper(accumulate=1, ranks=1):
    """``compute_loss`` calls ``self.model``, the bare one, and not the model that it is given."""
    import transformers

    class Own(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            out = self.model(**inputs)
            return (out["loss"], out) if return_outputs else out["loss"]

    return from_trainer(Own(model=Classifier(), args=arguments(accumulate), train_dataset=Points()))


def trainer_with_a_mean_of_each_rank(accumulate=1, ranks=1):
    """``compute_loss`` divides by the tokens of this rank's rows."""
    import transformers

    class Own(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["labels"]
            scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return from_trainer(Own(model=language_model(), args=arguments(accumulate), train_dataset=Texts()))


# --- Accelerate


def classified(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def train(accelerator, model, optimizer, batches, loss=classified, metrics=()):
    model.train()
    for batch in batches:
        with accelerator.accumulate(model):
            value = loss(model, batch)
            accelerator.backward(value)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for kept in metrics:
            kept.append(accelerator.gather_for_metrics(value.detach()).mean().item())


def looped(accelerator, model, optimizer, **how):
    return TrainLoop(
        model=model,
        optimizer=optimizer,
        batch=data.labelled(),
        fit=lambda batches: train(accelerator, model, optimizer, batches, **how),
    )


def prepared(accelerator, **how):
    raw = nets.mlp(6, 16, 3)
    return looped(accelerator, *accelerator.prepare(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2)), **how)


def accelerated(accumulate=1, ranks=1):
    return prepared(fresh_accelerator(cpu=True, gradient_accumulation_steps=accumulate), metrics=([],))


def accelerated_without_the_adapter(accumulate=1, ranks=1):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    assert accelerator.num_processes == ranks
    loop = prepared(accelerator)
    loop.model = accelerator.unwrap_model(loop.model)
    return loop


def accelerated_model_not_prepared(accumulate=1, ranks=1):
    """The optimizer is prepared, the model is not: every rank trains its own."""
    accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = nets.mlp(6, 16, 3)
    return looped(accelerator, model, accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2)))


def accelerated_past_the_wrapper(accumulate=1, ranks=1):
    accelerator = fresh_accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    return prepared(accelerator, loss=lambda model, batch: classified(accelerator.unwrap_model(model), batch))


# --- Lightning


def lightning_trainer(accumulate, ranks, **options):
    import lightning.pytorch as lightning

    return lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def lightning_module():
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nets.mlp(6, 16, 3)

        def training_step(self, batch, index):
            x, y = batch
            loss = F.cross_entropy(self.body(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module


def lightning_ddp(accumulate=1, ranks=1):
    return from_lightning(
        lightning_module()(), lightning_trainer(accumulate, ranks, gradient_clip_val=0.5), batch=data.labelled()
    )


def lightning_by_hand(ranks=1):
    class Module(lightning_module()):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            x, y = batch
            self.manual_backward(F.cross_entropy(self.body(x), y))
            optimizer.step()

    return from_lightning(Module(), lightning_trainer(1, ranks), batch=data.labelled())


def lightning_beside_the_module(ranks=1):
    """A head in a plain list is no part of the module that is wrapped: each rank trains its own."""

    class Module(lightning_module()):
        def __init__(self):
            super().__init__()
            self.heads = [nn.Linear(3, 3)]

        def training_step(self, batch, index):
            x, y = batch
            return F.cross_entropy(self.heads[0](self.body(x)), y)

        def configure_optimizers(self):
            return torch.optim.SGD([*self.parameters(), *self.heads[0].parameters()], lr=0.1)

    return from_lightning(Module(), lightning_trainer(1, ranks), batch=data.labelled())


RIGHT = {
    "trainer-classifier": trainer_of_classifier,
    "trainer-language_model": trainer_of_language_model,
    "trainer-adapters": trainer_with_adapters,
    "accelerate-guide": accelerated,
    "accelerate-without_the_adapter": accelerated_without_the_adapter,
    "lightning-ddp": lightning_ddp,
    "lightning-by_hand": lightning_by_hand,
}

FAULTY = {
    "trainer-past_the_wrapper": (trainer_past_the_wrapper, "wrapper_bypassed"),
    "trainer-mean_of_each_rank": (trainer_with_a_mean_of_each_rank, "mean_of_means"),
    "accelerate-model_not_prepared": (accelerated_model_not_prepared, "never_synchronised"),
    "accelerate-past_the_wrapper": (accelerated_past_the_wrapper, "wrapper_bypassed"),
    "lightning-beside_the_module": (lightning_beside_the_module, "parameters_not_in_wrapper"),
}
