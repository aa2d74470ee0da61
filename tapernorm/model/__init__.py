"""The decoder, what is computed with it (loss, continuations), folding, and weights in Hugging Face form.

May import config, data, runtime and method.
"""
