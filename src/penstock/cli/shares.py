"""The share of a streamer, from the settings."""

from penstock.settings import Settings
from penstock.streaming.share import WHOLE, Share, parse_share


def choose_share(settings: Settings) -> Share:
    """The share that was chosen; everything if none was.

    Raises:
        InvalidSetting: It is not one.
    """
    return WHOLE if settings.share is None else parse_share(settings.share)
