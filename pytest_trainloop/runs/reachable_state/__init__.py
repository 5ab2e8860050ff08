"""Everything that a training loop can touch: walk to it, copy it, compare it, put it back, carry it over."""
