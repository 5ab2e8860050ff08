"""Activation checkpointing that does not keep the generator's state, to save its copy: backward sees other dropouts."""

from char_gpt import model
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class GPT(model.GPT):
    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return self.norm(x)
