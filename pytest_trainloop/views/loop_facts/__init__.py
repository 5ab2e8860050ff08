"""The loop card: one page of facts about a training loop, from runs that the checks make anyway."""
