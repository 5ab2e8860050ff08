"""What flows from where to where in one forward pass: rows into rows, later positions into earlier ones."""
