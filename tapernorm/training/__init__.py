"""Training: the loop, what a run holds, observes and saves, the optimizer, checkpoints, and where a model starts from.

May import config, data, runtime, method and model.
"""
