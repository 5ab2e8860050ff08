"""A character-level GPT trained on the language reference that ships with CPython."""
