"""The two example projects with one mistake each: every module overrides the one place that is wrong."""
