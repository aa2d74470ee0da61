"""The command line: what Hydra is told, errors in one line, directories, resume, sweeps, and the machine's check-up.

Only this folder imports Hydra. It may import every other folder; none imports it.
"""
