"""What a project declares of its loop, and what is said of declarations that cannot be used."""
