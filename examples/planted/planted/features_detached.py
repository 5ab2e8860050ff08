"""The residual stream is detached to log its norm, and the detached one is passed on."""

from char_gpt import model
from torch import Tensor


class GPT(model.GPT):
    def features(self, tokens: Tensor) -> Tensor:
        self.stream_norms: list[Tensor] = []
        x = self.embed(tokens)
        for block in self.blocks:
            x = x.detach()
            self.stream_norms.append(x.norm())
            x = block(x)
        return self.norm(x)
