"""The worker: staged records → journal → Redis.

Three steps, each a function that does one pass and returns what it did; each may be done by any process at any time,
also by two at once:

    tick      gives every newly committed record its offset, and writes that into the journal, durably
    publish   replays the journal into Redis, from wherever Redis' own tail is
    retain    removes what every consumer has passed and `keep` no longer wants

``Streamer`` is the three in a loop.
"""

from penstock.streaming.publisher import Published, Publisher
from penstock.streaming.retention import Retained, retain
from penstock.streaming.sequencer import Tick, tick
from penstock.streaming.streamer import Pass, Streamer

__all__ = ["Pass", "Published", "Publisher", "Retained", "Streamer", "Tick", "retain", "tick"]
