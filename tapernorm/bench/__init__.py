"""Benchmarks of norms in decoding: timings, the models that are compared, tables.

May import everything but cli.
"""
