"""Text to batches: sources, the toy stories, tokenizers, data prepared once, batches as a function of (seed, step).

May import tapernorm.config.
"""
