"""What reaches loss functions, and what they are promised."""
