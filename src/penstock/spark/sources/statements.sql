-- :name held
-- What the journal holds of each shard: the oldest and the newest offset.
SELECT s.shard, journal.first_offset, journal.last_offset
FROM generate_series(0, %(shards)s::int - 1) AS s (shard),
     LATERAL {schema}.journal_bounds(%(channel)s, s.shard) AS journal;

-- :name records_of_range
-- The records at the offsets after one and up to another, payloads as text.
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
  AND e.first_offset <= %(until)s
  AND e.last_offset > %(after)s
  AND e.first_offset + n.position - 1 > %(after)s
  AND e.first_offset + n.position - 1 <= %(until)s
ORDER BY 3;
