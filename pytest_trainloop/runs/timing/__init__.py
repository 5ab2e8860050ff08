"""How long the loop's own steps take, and how much memory they need: runs that nothing watches."""
