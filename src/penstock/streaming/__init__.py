"""The worker: staged records → journal → Redis.

Three steps, each a function that runs one round and returns what it did.  Any process may run them
at any time, also two processes at once:

    sequencer   a tick gives every newly committed record its offset, durably, in the journal
    publisher   replays the journal into Redis, from wherever Redis' own tail is, by the sender of
                each kind of channel
    retention   removes what every consumer has passed and ``keep`` no longer holds

``Streamer`` runs the three in a loop.
"""

from penstock.streaming.publisher import Published, Publisher
from penstock.streaming.retention import Retained, retain
from penstock.streaming.sequencer import Tick, tick
from penstock.streaming.share import RoundResult, Share
from penstock.streaming.streamer import Streamer

__all__ = [
    "Published",
    "Publisher",
    "Retained",
    "RoundResult",
    "Share",
    "Streamer",
    "Tick",
    "retain",
    "tick",
]
