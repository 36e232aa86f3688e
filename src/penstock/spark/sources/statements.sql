-- :name available
-- The first and the last offset that the journal has of each shard.
SELECT s.shard, journal.first_offset, journal.last_offset
FROM generate_series(0, %(shards)s::int - 1) AS s (shard),
     LATERAL {schema}.journal_bounds(%(channel)s, s.shard) AS journal;

-- :name records_in_range
-- The records from one offset to another, both included, with payloads as text.
SELECT %(channel)s::text AS channel,
       %(shard)s::int AS shard,
       e.first_offset + n.position - 1 AS "offset",
       r.id, r.key, r.action, r.object,
       r.data::text AS data,
       r.headers::text AS headers,
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
