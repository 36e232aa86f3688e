"""How many shards a channel has: what the option says, or what Postgres has registered."""

import os

from penstock.engines.spark.sources.options import Options
from penstock.errors import InvalidSetting, Unknown
from penstock.postgres import answering, connect_postgres
from penstock.statements import statements


def number_of_shards(options: Options) -> int:
    """The number of shards of the options' channel.

    Raises:
        InvalidSetting: Nothing says where to ask.
        Unknown: No channel of that name is registered.
        ServerUnavailable: Postgres does not answer.
    """
    if options.shards is not None:
        return options.shards
    url = options.database_url or os.environ.get("PENSTOCK_DATABASE_URL")
    if not url:
        raise InvalidSetting(
            f"{options.source}: give option shards, or databaseUrl to look it up in Postgres"
        )
    with (
        connect_postgres(url, application="spark") as connection,
        answering("reading the channels"),
    ):
        row = connection.execute(
            statements("penstock", options.schema)["channel"], {"channel": options.channel}
        ).fetchone()
    if row is None:
        raise Unknown(
            f"{options.source}: no channel {options.channel!r} is registered in schema {options.schema}; "
            "a streamer registers it when it starts"
        )
    return int(row[1])
