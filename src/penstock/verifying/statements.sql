-- :name checkpoints_and_beginnings
-- The first offset of the journal and the consumers' checkpoints, in one snapshot: no checkpoint lies before the journal.
SELECT s.channel, s.shard, journal.first_offset, c.consumer, c."offset"
FROM unnest(%(channels)s::text[], %(shards)s::int[]) AS s (channel, shard)
CROSS JOIN LATERAL {schema}.journal_bounds(s.channel, s.shard) AS journal
LEFT JOIN {schema}.checkpoints c ON c.channel = s.channel AND c.shard = s.shard;

-- :name first_since
-- The first offset of each shard that was sequenced at or after a time.
SELECT s.channel, s.shard, min(j.first_offset)
FROM unnest(%(channels)s::text[], %(shards)s::int[]) AS s (channel, shard)
JOIN {schema}.journal j ON j.channel = s.channel AND j.shard = s.shard
WHERE j.created_at >= %(since)s::timestamptz
GROUP BY s.channel, s.shard;

-- :name begins
-- The first offset of a shard's journal; null if it has no row.
SELECT min(first_offset)
FROM {schema}.journal
WHERE channel = %(channel)s AND shard = %(shard)s;

-- :name heaviest
-- The largest payload plus headers among the records in a range of offsets, in bytes as stored.
SELECT max(coalesce(pg_column_size(r.data), 0) + coalesce(pg_column_size(r.headers), 0))
FROM {schema}.journal e,
     LATERAL unnest(e.record_ids) AS n (id),
     LATERAL (SELECT * FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r  -- a look-up by id
WHERE e.channel = %(channel)s AND e.shard = %(shard)s
  AND e.first_offset <= %(until)s
  AND e.first_offset >= coalesce((
      SELECT max(first_offset)
      FROM {schema}.journal
      WHERE channel = %(channel)s AND shard = %(shard)s AND first_offset <= %(after)s + 1
  ), 0);

-- :name expected_records
-- What the log should hold in a range of offsets, each value as the publisher sends it.  One statement sees one
-- snapshot, and retention removes journal and records together: both are there, or neither is.
SELECT e.first_offset + n.position - 1 AS "offset",
       n.id AS named,
       e.first_offset AS entry,
       r.id IS NOT NULL AS present,
       coalesce(r.channel = %(channel)s, false)
       -- once the number of shards was changed, the journal decides alone
       AND (r.shard = e.shard
            OR EXISTS (SELECT FROM {schema}.channels c WHERE c.channel = e.channel AND c.generations <> '{}')) AS at_home,
       n.id::text AS id,
       r.key,
       r.action,
       r.object,
       r.data::text AS data,
       coalesce(r.headers::text, '') AS headers,
       (extract(epoch FROM r.created_at) * 1000000)::bigint::text AS ts
FROM (
         -- the row that holds the first offset, and the rows after it
         SELECT *
         FROM {schema}.journal
         WHERE channel = %(channel)s AND shard = %(shard)s
           AND first_offset <= %(until)s
           AND first_offset >= coalesce((
               SELECT max(first_offset)
               FROM {schema}.journal
               WHERE channel = %(channel)s AND shard = %(shard)s AND first_offset <= %(after)s + 1
           ), 0)
     ) e,
     LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
     LEFT JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r ON true  -- a look-up by id
WHERE e.first_offset + n.position - 1 > %(after)s
  AND e.first_offset + n.position - 1 <= %(until)s
ORDER BY 1, 2;

-- :name places
-- Where the journal has some records.  Reads the whole journal, but only numbers.
SELECT n.id, j.channel, j.shard, j.first_offset + n.position - 1
FROM {schema}.journal j,
     LATERAL unnest(j.record_ids) WITH ORDINALITY AS n (id, position)
WHERE n.id = ANY (%(records)s::bigint[])
ORDER BY n.id, j.channel, j.shard, 4;

-- :name repeats
-- Records that some ranges of the journal name more than once, and by how many times too often all of them together.
SELECT n.id, (sum(count(*) - 1) OVER ())::bigint
FROM unnest(%(channels)s::text[], %(shards)s::int[], %(after)s::bigint[], %(until)s::bigint[])
         AS w (channel, shard, after, until)
JOIN {schema}.journal e ON e.channel = w.channel AND e.shard = w.shard AND e.last_offset > w.after AND e.first_offset <= w.until,
     LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
WHERE e.first_offset + n.position - 1 > w.after AND e.first_offset + n.position - 1 <= w.until
GROUP BY n.id
HAVING count(*) > 1
ORDER BY n.id
LIMIT %(limit)s;

-- :name overtaken
-- Number of records that come after a newer record of their key.  Keys are compared by their hash.
SELECT count(*)
FROM (
         SELECT n.id < lag(n.id) OVER (
                    PARTITION BY e.channel, e.shard, hashtextextended(r.key, 0)
                    ORDER BY e.first_offset + n.position
                ) AS is_overtaken
         FROM unnest(%(channels)s::text[], %(shards)s::int[], %(after)s::bigint[], %(until)s::bigint[])
                  AS w (channel, shard, after, until)
         JOIN {schema}.journal e ON e.channel = w.channel AND e.shard = w.shard AND e.last_offset > w.after AND e.first_offset <= w.until,
              LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
         JOIN {schema}.staged_records r ON r.id = n.id
         WHERE e.first_offset + n.position - 1 > w.after AND e.first_offset + n.position - 1 <= w.until
     ) ordered
WHERE is_overtaken;
