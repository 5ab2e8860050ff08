"""Features are brought to length one along the wrong axis: over the images, not over each one's channels."""

import torch.nn.functional as F
from digits_cnn import model
from torch import Tensor


class SmallCNN(model.SmallCNN):
    def features(self, images: Tensor) -> Tensor:
        return 8 * F.normalize(super().features(images), dim=0)
