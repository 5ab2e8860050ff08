"""Attention pooling whose softmax runs over the one channel of scores in place of the positions."""

from digits_cnn import model
from torch import Tensor, nn


class SmallCNN(model.SmallCNN):
    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__(channels, classes)
        self.score = nn.Conv2d(2 * channels, 1, kernel_size=1)

    def features(self, images: Tensor) -> Tensor:
        maps = self.trunk(images)
        weights = self.score(maps).softmax(dim=1)
        return self.pool(maps * weights).flatten(1)
