"""Is everything where it should be?  Staged records, journal, log and checkpoints, against one another, while they move.

Nothing is stopped and no snapshot is held for long.  What makes it exact is the order of looking.  A record is in the
journal before it is in the log, and in the log before a checkpoint passes it; retention takes it out of Postgres before it
takes it out of the log.  So checkpoints are read first, then the log's ends, then the journal's; and of every stretch first
what the log holds, then what Postgres says.  What Postgres then still names, and the log should have had by its end, was
there a moment ago, or is lost.

    findings   what can be wrong, and how it is told
    bounds     where each shard is looked at, from and up to where; what its ends say by themselves
    comparing  one stretch of a shard, entry by entry: arithmetic, nothing else
    run        all of it in order; an engine reads the stretches
"""

from penstock.verifying.bounds import Start
from penstock.verifying.comparing import Remembered, Stretch, compare
from penstock.verifying.findings import Fault, Found, Stray
from penstock.verifying.run import Examined, Examiner, Verified, verify

__all__ = [
    "Examined",
    "Examiner",
    "Fault",
    "Found",
    "Remembered",
    "Start",
    "Stray",
    "Stretch",
    "Verified",
    "compare",
    "verify",
]
