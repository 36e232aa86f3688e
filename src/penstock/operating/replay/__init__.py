"""Replays a range of a log, or a key, into another channel: copies are staged there as new records.

replaying    what is to be replayed, and its plan; stages the copies, batch by batch, each in one transaction with the progress
"""

from penstock.operating.replay.replaying import Replay, ReplayedShard, ReplayRequest, replay

__all__ = ["Replay", "ReplayRequest", "ReplayedShard", "replay"]
