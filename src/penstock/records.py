"""What the parts of the pipeline hand each other.

A ``StagedRecord`` is what an application writes; a ``Record`` is what a consumer reads: the same, with its place.
Payloads stay text between the two: nothing on the way parses them.
"""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NewType

RecordId = NewType("RecordId", int)
"""Identity of a staged record: its number in ``staged_records``."""

Offset = NewType("Offset", int)
"""Place of a record in its shard: 1, 2, 3 … without a hole, for ever."""

Shard = NewType("Shard", int)
"""Number of a shard in its channel, from 0."""

Epoch = NewType("Epoch", int)
"""Incarnation of the log: goes up when the past of Postgres has changed."""

BEGINNING = Offset(0)
"""The checkpoint of a consumer that has seen nothing; the tail of a shard that holds nothing."""


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """A shard of a channel: ``rides/2``."""

    channel: str
    shard: Shard

    def __str__(self) -> str:
        return f"{self.channel}/{self.shard}"


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """What an application tells: a row of ``staged_records`` before it has a number.

    Attributes:
        channel: Name of the channel.
        shard: The shard that ``key`` belongs to.
        key: Records of one key keep their order.
        action: What happened: ``insert``, ``update``, ``delete`` or the application's own word.
        object: What it happened to: the name of a table, a class or a concept.
        data: The payload, anything that JSON can say.
        headers: Beside the payload: trace ids, versions.
    """

    channel: str
    shard: Shard
    key: str
    action: str
    object: str
    data: Any
    headers: dict[str, Any] | None = None


@dataclass(frozen=True)
class Record:
    """A record at its place in the log, as a consumer gets it.

    Attributes:
        channel: Name of the channel.
        shard: Number of the shard.
        offset: Place in the shard.
        id: Number of the staged record: unique in the pipeline's life.
        key: Records of one key come in the order in which their transactions took the key's row lock.
        action: What happened.
        object: What it happened to.
        data_json: The payload as JSON text, as it came out of Postgres.
        headers_json: The headers as JSON text; empty if there are none.
        staged_us: When the record was staged, by Postgres' clock: microseconds since 1970 (UTC).
    """

    channel: str
    shard: Shard
    offset: Offset
    id: RecordId
    key: str
    action: str
    object: str
    data_json: str
    headers_json: str = field(default="", repr=False)
    staged_us: int = 0

    @classmethod
    def of(cls, **fields: Any) -> "Record":
        """As the constructor, but all fields must be given.

        A third of its time, which a reader of logs spends on little else: a frozen class assigns one field after the
        other, round itself.
        """
        record = cls.__new__(cls)
        record.__dict__.update(fields)
        return record

    @cached_property
    def data(self) -> Any:
        """The payload, parsed on first use. Raises ``json.JSONDecodeError`` if it is not JSON."""
        return json.loads(self.data_json)

    @cached_property
    def headers(self) -> dict[str, Any]:
        """The headers, parsed on first use; empty if there are none."""
        parsed: dict[str, Any] = json.loads(self.headers_json) if self.headers_json else {}
        return parsed

    @property
    def staged_at(self) -> datetime:
        """When the record was staged, by Postgres' clock."""
        return datetime.fromtimestamp(self.staged_us / 1_000_000, UTC)

    @property
    def place(self) -> str:
        """Where the record stands, for people: ``rides/2 offset 4118``."""
        return f"{self.channel}/{self.shard} offset {self.offset}"

    def __repr__(self) -> str:
        return f"<Record {self.place} id={self.id} {self.action} {self.object} key={self.key!r}>"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """Some records that follow each other in a shard, as the journal remembers them.

    Attributes:
        shard: The shard.
        first: Offset of the first record.
        last: Offset of the last record.
        epoch: The epoch in which they were sequenced.
    """

    shard: ShardName
    first: Offset
    last: Offset
    epoch: Epoch

    def __len__(self) -> int:
        return self.last - self.first + 1
