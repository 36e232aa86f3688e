"""What an operator decides: to move a checkpoint, to go on in a new epoch after the past has changed, to mend an Ick.

All make a plan first, and carry it out only when told to; what was done is written to the log.
"""

from penstock.operating.reset.checkpoint import Move, Target, reset_checkpoint
from penstock.operating.reset.epoch import Beyond, Disagreement, EpochPlan, reset_epoch
from penstock.operating.reset.ick import Mended, reset_ick

__all__ = [
    "Beyond",
    "Disagreement",
    "EpochPlan",
    "Mended",
    "Move",
    "Target",
    "reset_checkpoint",
    "reset_epoch",
    "reset_ick",
]
