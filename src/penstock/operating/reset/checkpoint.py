"""Moving a consumer's checkpoint by hand: back, so that records take effect again, or forward, past records.

``exactly once`` is the operator's from then on: what has been applied and comes again is applied again.
"""

from dataclasses import dataclass
from typing import Any, Literal

import structlog

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import Refused, Unknown
from penstock.operating.consumers import registered
from penstock.records import Offset, Shard, ShardName

log = structlog.get_logger("penstock.operator")

Target = Offset | Literal["earliest", "latest"] | None
"""The offset after which the consumer goes on; ``earliest`` and ``latest`` are the journal's ends; None stays."""


@dataclass(frozen=True, slots=True)
class Move:
    """What becomes of one checkpoint.

    Attributes:
        consumer: The consumer.
        channel: What it reads.
        shard: The shard.
        before: Its checkpoint.
        after: Its checkpoint afterwards.
        again: Records that will be applied once more.
        passed_over: Records that will never be applied.
        dead_letters: Dead letters that are removed, because their records come again.
        resumes: The shard was halted, and will go on.
    """

    consumer: str
    channel: str
    shard: int
    before: int
    after: int
    again: int
    passed_over: int
    dead_letters: int
    resumes: bool


def reset_checkpoint(  # noqa: PLR0913  what is asked and what may be left out
    connection: Connection,
    consumer: str,
    to: Target = None,
    *,
    shard: int | None = None,
    resume: bool = False,
    apply: bool = False,
    schema: str = DEFAULT_SCHEMA,
) -> tuple[Move, ...]:
    """Plans where the checkpoints go; with ``apply``, moves them.

    A running worker takes the move into account with the next record that arrives, or within two seconds.

    Args:
        connection: In autocommit mode.
        consumer: Its name.
        to: The last offset that counts as applied.
        shard: Number of the only shard to move; None moves all.
        resume: Let halted shards go on.
        apply: Carry the plan out.
        schema: The Penstock schema.

    Raises:
        Unknown: There is no such consumer or shard.
        Refused: The journal does not reach to the offset, or one offset is meant for several shards.
        ServerUnavailable: Postgres does not answer.
    """
    sql = statements("penstock.operating", schema)
    with postgres_errors(f"moving checkpoints of {consumer}"), connection.transaction():
        if apply:
            for each in registered(connection, consumer, schema=schema):
                # Retention takes the same lock: it does not remove what a checkpoint is put back to.
                connection.execute(
                    statements("penstock.database", schema)["lock_channel"],
                    {"channel": each.channel},
                )
            connection.execute(sql["lock_checkpoints"], {"consumer": consumer})
        rows = connection.execute(sql["checkpoint_bounds"], {"consumer": consumer}).fetchall()
        moves = _plan(connection, consumer, rows, to, shard, resume, schema)
        if apply:
            for move in moves:
                connection.execute(
                    sql["move_checkpoint"],
                    {
                        "consumer": consumer,
                        "channel": move.channel,
                        "shard": move.shard,
                        "offset": move.after,
                        "resume": resume,
                    },
                )
    if apply:
        for move in moves:
            log.warning(
                "checkpoint moved",
                consumer=consumer,
                shard=f"{move.channel}/{move.shard}",
                before=move.before,
                after=move.after,
                resumed=move.resumes,
                dead_letters_removed=move.dead_letters,
            )
    return moves


def _plan(  # noqa: PLR0913, PLR0917  as above
    connection: Connection,
    consumer: str,
    rows: list[tuple[Any, ...]],
    to: Target,
    shard: int | None,
    resume: bool,  # noqa: FBT001  private
    schema: str,
) -> tuple[Move, ...]:
    if not rows:
        names = ", ".join(sorted({each.consumer for each in registered(connection, schema=schema)}))
        raise Unknown(f"no consumer {consumer!r} is registered; there are: {names or 'none'}")
    chosen = [row for row in rows if shard is None or row[1] == shard]
    if not chosen:
        raise Unknown(
            f"consumer {consumer} has no checkpoint in shard {shard}; it has shards 0 to {len(rows) - 1}"
        )
    if isinstance(to, int) and len(chosen) > 1:
        raise Refused(
            f"consumer {consumer} has {len(chosen)} shards, and each counts for itself: name one with --shard, "
            "or give 'earliest' or 'latest'"
        )
    return tuple(
        _move(consumer, row, to, resume=resume)
        for row in chosen
        if to is not None or (resume and row[3] is not None)
    )


def _move(consumer: str, row: tuple[Any, ...], to: Target, *, resume: bool) -> Move:
    channel, shard, before, halted, earliest, latest, letters = row
    match to:
        case None:
            after = before
        case "earliest":
            after = earliest
        case "latest":
            after = latest
        case _:
            after = to
    if not earliest <= after <= latest and after != before:
        raise Refused(
            f"{ShardName(channel, Shard(shard))}: a checkpoint can stand from {earliest} (before the oldest record that is kept) "
            f"to {latest} (after the newest); {after} is neither"
        )
    return Move(
        consumer,
        channel,
        shard,
        before,
        after,
        again=max(0, before - after),
        passed_over=max(0, after - before),
        dead_letters=sum(offset > after for offset in letters),
        resumes=resume and halted is not None,
    )
