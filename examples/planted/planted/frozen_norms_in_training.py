"""The trunk is frozen, and its batch norms follow the data: the trainer calls train() on the whole model."""

from digits_cnn import model


class SmallCNN(model.SmallCNN):
    def __init__(self, channels: int) -> None:
        super().__init__(channels=channels)
        self.trunk.requires_grad_(False)
