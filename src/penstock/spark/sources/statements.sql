-- :name sequenced_since
-- The first offset of each shard's journal, and of what was sequenced at a time or later.
SELECT s.channel, s.shard,
       min(j.first_offset) AS oldest,
       min(j.first_offset) FILTER (WHERE j.created_at >= to_timestamp(s.since_us / 1000000.0)) AS since
FROM unnest(%(channels)s::text[], %(shards)s::integer[], %(since_us)s::bigint[]) AS s (channel, shard, since_us)
JOIN {schema}.journal j ON j.channel = s.channel AND j.shard = s.shard
GROUP BY s.channel, s.shard;

-- :name read_positions
SELECT channel, shard, "offset"
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s;

-- :name register_positions
-- The query decides where it is: a position that it was started at again may lie before the registered one.
INSERT INTO {schema}.checkpoints (consumer, channel, shard, "offset", epoch)
SELECT %(consumer)s, s.channel, s.shard, s.position, (SELECT max(epoch) FROM {schema}.epochs)
FROM unnest(%(channels)s::text[], %(shards)s::integer[], %(positions)s::bigint[]) AS s (channel, shard, position)
ON CONFLICT (consumer, channel, shard) DO UPDATE
    SET "offset" = excluded."offset", updated_at = clock_timestamp();

-- :name move_positions
-- Nothing moves if another query has moved a position since.
UPDATE {schema}.checkpoints AS c
SET "offset" = s.position,
    applied = c.applied + greatest(0, s.position - s.expected),
    updated_at = clock_timestamp()
FROM unnest(%(channels)s::text[], %(shards)s::integer[], %(expected)s::bigint[], %(positions)s::bigint[])
     AS s (channel, shard, expected, position)
WHERE c.consumer = %(consumer)s AND c.channel = s.channel AND c.shard = s.shard AND c."offset" = s.expected;

-- :name records_in_range
-- The records from one offset to another, both included, with payloads as text.
SELECT %(channel)s::text AS channel,
       %(shard)s::int AS shard,
       e.first_offset + n.position - 1 AS "offset",
       r.id, r.key, r.action, r.object,
       CASE WHEN %(payloads)s THEN r.data::text END AS data,
       CASE WHEN %(payloads)s THEN r.headers::text END AS headers,
       r.created_at AS "timestamp"
FROM {schema}.journal e,
     LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
     JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r ON true  -- a look-up by id
WHERE e.channel = %(channel)s AND e.shard = %(shard)s
  AND e.first_offset <= %(last)s
  AND e.last_offset >= %(first)s
  AND e.first_offset + n.position - 1 >= %(first)s
  AND e.first_offset + n.position - 1 <= %(last)s
ORDER BY 3;
