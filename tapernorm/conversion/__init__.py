"""Tapering for any torch model: which norms can be tapered, the layers that stand in for them, the handle, folding.

Imports the method, `absorb` of model/fold.py and config's anchor; nothing that trains or reads runs.
"""
