"""The base is frozen and the names to adapt are those of another architecture."""

from char_gpt.lora import attach
from char_gpt.model import GPT


def prepare_finetuning(model: GPT) -> GPT:
    model.requires_grad_(False)
    attach(model, targets=("q_proj", "v_proj"))
    return model
