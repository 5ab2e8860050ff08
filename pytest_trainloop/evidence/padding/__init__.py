"""What is known of the padding of a batch, and runs of a loop with more and with less of it."""
