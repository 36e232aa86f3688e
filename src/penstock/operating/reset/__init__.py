"""Operator decisions: move a checkpoint, open a new epoch after history has diverged, accept a source's, repair an Ick.

Each function returns a plan, and carries it out only with ``apply``.  What was done is written to the log.
"""

from penstock.operating.reset.checkpoint import CheckpointTarget, reset_checkpoint, reset_ick
from penstock.operating.reset.doubt import ConsumerInDoubt, OffsetsInDoubt
from penstock.operating.reset.epoch import EpochPlan, reset_epoch
from penstock.operating.reset.source_history import AcceptedShard, reset_source

__all__ = [
    "AcceptedShard",
    "CheckpointTarget",
    "ConsumerInDoubt",
    "EpochPlan",
    "OffsetsInDoubt",
    "reset_checkpoint",
    "reset_epoch",
    "reset_ick",
    "reset_source",
]
