"""Checkpoints for others: export for transformers, with the code in exported/, and models for TransformerLens.

May import everything but bench and cli.
"""
