"""Every key of training and of the other programs (type, range, default, meaning), which keys are paths, norm sites.

Imports no other folder and no torch, so that a wrong key is reported before anything slow happens.
"""
