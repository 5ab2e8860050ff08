"""Whether the loop learns one fixed batch, and evidence that both of its checks use."""
