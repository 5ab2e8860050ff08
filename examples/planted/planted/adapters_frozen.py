"""The base is frozen after the adapters were attached, and they with it; only the last norm trains."""

from char_gpt.lora import attach
from char_gpt.model import GPT


def prepare_finetuning(model: GPT) -> GPT:
    attach(model, targets=("qkv", "out", "up", "down"))
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    return model
