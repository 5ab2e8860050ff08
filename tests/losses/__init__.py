"""What the corpora of losses are made of; ``corpus`` finds all of them."""
