"""What is made of finished work: evaluations of checkpoints, losses with their errors, comparisons of runs, the report.

May import config, data, runtime, model and training; what reports are made of imports no torch.
"""
