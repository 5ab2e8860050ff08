"""Text classification with the Hugging Face Trainer: a small BERT, sentences of unequal length, padded per batch."""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from pytest_trainloop.adapters import from_trainer

PAD = 0


class Reviews(torch.utils.data.Dataset):
    """Token ids of unequal length; the label depends on the first token."""

    def __init__(self, size: int = 48, seed: int = 7):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 14, (size,), generator=draw).tolist()
        self.ids = [torch.randint(1, 60, (n,), generator=draw).tolist() for n in lengths]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "label": ids[0] % 2}


class PaddingCollator:
    """What ``DataCollatorWithPadding`` does, without a tokenizer."""

    def __call__(self, rows):
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name, value):
            return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

        return {
            "input_ids": padded("input_ids", PAD),
            "attention_mask": padded("attention_mask", 0),
            "labels": torch.tensor([row["label"] for row in rows]),
        }


def make():
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        pad_token_id=PAD,
        num_labels=2,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        num_train_epochs=2,
        weight_decay=0.01,
        warmup_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Reviews(),
        eval_dataset=Reviews(16, seed=8),
        data_collator=PaddingCollator(),
    )
    return from_trainer(trainer)
