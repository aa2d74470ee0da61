"""tapernorm: train transformers whose normalization layers can be tapered away, and see what they do."""

__version__ = "0.1.0"
