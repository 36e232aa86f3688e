"""Operations on registered channels: list, retire, reshard, bring a name back.

A channel that is retired leaves its name behind.  Applications and workers that still use it are refused: otherwise one of
them would begin the channel anew, and nobody would notice.
"""

from penstock.operating.channels.administration import (
    LeftReader,
    ListedChannel,
    ReshardPlan,
    Retirement,
    adopt_channel,
    find_channel,
    list_channels,
    reshard,
    retire_channel,
    unknown_channel,
)

__all__ = [
    "LeftReader",
    "ListedChannel",
    "ReshardPlan",
    "Retirement",
    "adopt_channel",
    "find_channel",
    "list_channels",
    "reshard",
    "retire_channel",
    "unknown_channel",
]
