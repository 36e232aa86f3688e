"""Operations on registered channels: list, retire, reshard, bring a name back.

A channel that is retired leaves its name behind.  Applications and workers that still use it are refused: otherwise one of
them would begin the channel anew, and nobody would notice.
"""

from penstock.operating.channels.listing import ListedChannel, list_channels, unknown_channel
from penstock.operating.channels.retiring import LeftReader, Retirement, adopt_channel, retire_channel

__all__ = [
    "LeftReader",
    "ListedChannel",
    "Retirement",
    "adopt_channel",
    "list_channels",
    "retire_channel",
    "unknown_channel",
]
