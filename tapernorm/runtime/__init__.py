"""What surrounds a run: processes, device, log and lock, signals, progress, and the files that record it.

Imports config.
"""
