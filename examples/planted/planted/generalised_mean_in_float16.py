"""Generalised-mean pooling inside autocast: 1e-3 to the sixth power is zero in float16, and the sixth root of zero has
no slope."""

from digits_cnn import model
from torch import Tensor


class SmallCNN(model.SmallCNN):
    def features(self, images: Tensor) -> Tensor:
        powers = self.trunk(images).clamp(min=1e-3).pow(6.0)
        return self.pool(powers).pow(1.0 / 6.0).flatten(1)
