"""A log without a pipeline: reading it by offset, writing it, and groups of readers that share it.

log_reader      ``LogReader``; ``log_slices`` are what it returns
log_writer      ``LogWriter``
log_group       ``LogGroup``: each record goes to one reader of a group
group_results   what it is given
turns           how its readers take turns
arguments       what all of them take, checked; how a group reads
"""
