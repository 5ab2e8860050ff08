"""One experiment: what the loop's first step reads on a composition of the rows of its own batch.

A :class:`Composition` says which rows, in which order, cut into which micro-batches, and what else is changed of them.
``evidence.shared(StepGradients.of)`` makes the gradient on one, once, in float64 from one start; ``smallest`` has
Hypothesis search for the smallest composition that shows a fault. Checks compare gradients that must be equal, or must
be weighted sums of others. An :class:`Experiment` makes one step on other batches, or under modes that replace calls.
"""
