"""What a loop did before a refactor."""
