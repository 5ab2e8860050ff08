"""What the report draws of one loop, as plain data: curves, bars, maps of tensors over steps, the calls of one step."""
