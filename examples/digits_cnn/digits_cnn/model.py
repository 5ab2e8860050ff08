"""A convolutional network for grey images of 8 by 8."""

from torch import Tensor, nn


def conv_block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class SmallCNN(nn.Module):
    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            conv_block(1, channels),
            conv_block(channels, 2 * channels),
            nn.MaxPool2d(2),
            conv_block(2 * channels, 2 * channels),
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(2 * channels * 4, classes)

    def features(self, images: Tensor) -> Tensor:
        return self.pool(self.trunk(images)).flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))
