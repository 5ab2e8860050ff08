"""What the corpora of training loops are made of; ``corpus`` finds all of them."""
