"""Weight decay that lands where it is not meant to, or nowhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.from_threads import fault


class MaskedHead(nn.Module):
    """Returns a loss when it is given labels, as the library's models do."""

    def __init__(self, vocab=30, width=32):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, width)
        self.LayerNorm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)
        self.layer_norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, input_ids, labels=None):
        x = self.LayerNorm(self.embeddings(input_ids))
        logits = self.decoder(self.layer_norm(F.gelu(self.dense(x + x.mean(1, keepdim=True)))))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class TokenRows(torch.utils.data.Dataset):
    def __init__(self, rows=64):
        self.tokens = torch.randint(0, 30, (rows, 8))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].roll(1)}


def training_arguments(**kwargs):
    import tempfile

    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **kwargs,
    )


@fault(
    "decay",
    "the no_decay names of create_optimizer know 'LayerNorm.weight', and the head's norm is called layer_norm: its "
    "weight is decayed",
    thread="huggingface/transformers#16908",
    check="weight_decay_groups",
)
def masked_language_model():
    from transformers import Trainer

    from pytest_trainloop.adapters import from_trainer

    class GroupedTrainer(Trainer):
        def create_optimizer(self, model=None):
            no_decay = ["bias", "LayerNorm.weight"]
            named = list(self.model.named_parameters())
            groups = [
                {
                    "params": [p for n, p in named if not any(nd in n for nd in no_decay)],
                    "weight_decay": self.args.weight_decay,
                },
                {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=self.args.learning_rate)
            return self.optimizer

    trainer = GroupedTrainer(model=MaskedHead(), args=training_arguments(weight_decay=0.1), train_dataset=TokenRows())
    return from_trainer(trainer)
