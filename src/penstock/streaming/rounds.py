"""Rounds of the streamer: what one of them did, and the pause before the next."""

from dataclasses import dataclass

IDLE_S = 0.025
"""Longest pause between two rounds that found nothing, in seconds."""

BUSY_PAUSE_S = 0.0005
"""Shortest pause between two rounds without a backlog, in seconds.  Records committed meanwhile go together: at a thousand
records a second they arrive earlier than one by one, which would keep both servers busy with the rounds themselves."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Result of one round of the streamer.

    Attributes:
        sequenced: Records that got their offset.
        added: Records that were new to the log.
        known: Records sent that the log already had.
        removed: Staged records that retention removed.
        backlog: Records that the journal has and the usable logs of the streamer's share lack.
    """

    sequenced: int = 0
    added: int = 0
    known: int = 0
    removed: int = 0
    backlog: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing was done and nothing waits."""
        return not (self.sequenced or self.added or self.known or self.backlog)


def pause_after(done: RoundResult, pause_s: float, idle_s: float) -> float:
    """The pause after a round, in seconds, given the pause before it and the longest."""
    if done.backlog:
        return 0.0
    return min(idle_s, max(BUSY_PAUSE_S, pause_s * 1.5) if done.idle else BUSY_PAUSE_S)
