"""Whether values stay finite and low precision computes what float32 does."""
