"""The parameters are collected part by part, and the tied embedding comes again with the head."""

from char_gpt.model import GPT
from char_gpt.train import TrainConfig
from torch.optim import AdamW


def configure_optimizer(model: GPT, config: TrainConfig) -> AdamW:
    parts = [model.token_embedding, model.position_embedding, model.blocks, model.norm, model.head]
    return AdamW([p for part in parts for p in part.parameters()], lr=config.rate)
