"""The calls of a log: it stages its own records, typed by their payload.

rides = Log("rides", payload=Fare)

rides.stage(session, Fare(17), key=ride.id)
"""

from typing import TYPE_CHECKING, Any

from penstock.declaring.kinds import LogChannel
from penstock.records import Payload
from penstock.staging.explicit import Target, stage, stage_async
from penstock.staging.payload_models import checked_model
from penstock.staging.rules import Declarations

if TYPE_CHECKING:
    from penstock.staging.explicit import AsyncTarget


class Log(LogChannel[Payload]):
    """A channel that keeps records in order: one Redis stream a shard.

    Attributes:
        name: Name of the channel, 1 to 63 characters of ``a-z 0-9 _ . -``.
        shards: Number of shards: the key of a record decides its shard.  Changed by
            ``penstock channels reshard``.
        keep: How long records stay after every consumer has passed them, for new consumers and for
            looking back.
        max_bytes: Largest payload that ``stage`` takes, in bytes of JSON; 64 MiB at the most.
        entries: ``packed`` puts a batch of records into an entry of the stream, ``plain`` each
            record into one of its own.  May change at any time; readers take both.
        compression: ``zstd`` compresses packed entries; needs
            ``pip install 'penstock-outbox[zstd]'`` where they are written or read.  May change at
            any time.
        redis_memory: Most memory that Redis may use for its streams, all shards together, in bytes,
            or as a text with its unit: ``"64MB"``.  Each shard has an equal part.  Beyond it the
            oldest entries leave Redis, whether they have been read or not, and consumers read them
            from Postgres.  None sets no limit.  May change at any time.
        source: Name of this application's database among several that share the log's name.  The
            channel is then called ``rides@eu``, in Redis, in the journal, in commands and as the
            ``channel`` of a ``Record``.
        payload: A dataclass, TypedDict, msgspec Struct or Pydantic model that its records' payloads
            are: type checkers then know it at both ends, and what does not fit is refused where it
            is staged, if Pydantic is installed, but by triggers.
        sources: For a service that reads the log from several sources, and stages nothing into it:
            their names.  Each source's own database tells how many shards there are, and ``shards``
            means nothing here.
    """

    def stage(  # noqa: PLR0913  a record has this many parts
        self,
        target: Target,
        payload: Payload,
        *,
        key: object,
        action: str | None = None,
        object: str | None = None,  # noqa: A002  the name of the record's field
        headers: dict[str, Any] | None = None,
        pipeline: Declarations | None = None,
    ) -> None:
        """Stages a record of this log, typed by its ``payload``.

        See ``penstock.stage`` for targets and errors.

        Args:
            target: A session, or a connection in a transaction.
            payload: An instance of the log's ``payload``, or any JSON value if it declares none.
            key: Records of one key keep their order.
            action: What happened; by default the name of the declared payload, or ``insert``.
            object: What it happened to; by default the log's name, without its source.
            headers: Metadata beside the payload.
            pipeline: The pipeline, for a connection or a session to which it is not attached.

        Raises:
            InvalidRecord: A field is invalid, or the payload is of another type; nothing was
                written.
            NotAttached: No pipeline with this log is attached to the session, or none is given for
                the connection.
        """
        record = self._record(payload, key, action, object, headers)
        stage(target, to=self, pipeline=pipeline, **record)

    async def stage_async(  # noqa: PLR0913  as stage
        self,
        target: "AsyncTarget",
        payload: Payload,
        *,
        key: object,
        action: str | None = None,
        object: str | None = None,  # noqa: A002  as stage
        headers: dict[str, Any] | None = None,
        pipeline: Declarations | None = None,
    ) -> None:
        """``stage`` for an ``AsyncSession``, or an ``AsyncConnection`` of SQLAlchemy or psycopg.

        Raises:
            InvalidRecord: As ``stage``; so is ``NotAttached``.
        """
        record = self._record(payload, key, action, object, headers)
        await stage_async(target, to=self, pipeline=pipeline, **record)

    def _record(
        self, payload: Any, key: Any, action: str | None, object_: str | None, headers: Any
    ) -> dict[str, Any]:
        return {
            "key": key,
            "action": action or getattr(self.payload, "__name__", "insert"),
            "object": object_ or self.name.partition("@")[0],
            "data": checked_model(payload, self.payload),
            "headers": headers,
        }
