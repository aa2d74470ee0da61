"""The method: the gate, the norms it takes away, the calibration of what stays, the anchor of the scale; comparators.

Imports config/ and runtime/ alone.
"""
