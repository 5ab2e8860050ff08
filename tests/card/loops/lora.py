"""LoRA adapters on a small Llama, trained by the Trainer of transformers: warm-up, linear decay."""

import tempfile

import peft
import torch
import transformers

from pytest_trainloop.adapters import from_trainer

VOCABULARY = 64


def adapted_llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)  # stands for from_pretrained
        base = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(base, lora)


def instructions(rows):
    """A prompt of four tokens, whose loss is masked, and an answer of eight."""
    ids = torch.randint(1, VOCABULARY, (rows, 12))
    labels = ids.clone()
    labels[:, :4] = -100
    return [
        {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": row}
        for i, row in zip(ids, labels, strict=True)
    ]


def make(accumulate=1):
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        warmup_steps=2,
        weight_decay=0.01,
        max_grad_norm=0.1,
        use_cpu=True,
        report_to=[],
    )
    trainer = transformers.Trainer(
        model=adapted_llama(), args=arguments, train_dataset=instructions(48), eval_dataset=instructions(8)
    )
    return from_trainer(trainer)
