"""Adapters are attached and the base is never frozen."""

from char_gpt.lora import attach
from char_gpt.model import GPT


def prepare_finetuning(model: GPT) -> GPT:
    attach(model, targets=("qkv", "out", "up", "down"))
    return model
