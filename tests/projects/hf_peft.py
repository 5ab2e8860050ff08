"""LoRA on a causal language model with PEFT and the Hugging Face Trainer: only the adapters train."""

from __future__ import annotations

import tempfile

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pytest_trainloop.adapters import from_trainer

CONTEXT = 16


def dataset(size: int = 48):
    draw = torch.Generator().manual_seed(3)
    start = torch.randint(1, 50, (size, 1), generator=draw)
    rows = (start + 3 * torch.arange(CONTEXT)) % 49 + 1
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]


def make(accumulate=1):
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        num_train_epochs=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    return from_trainer(Trainer(model=peft.get_peft_model(base, lora), args=arguments, train_dataset=dataset()))
