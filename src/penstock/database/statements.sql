-- :name register_channel
INSERT INTO {schema}.channels AS known (channel, kind, shards, keep)
VALUES (%(channel)s, %(kind)s, %(shards)s, %(keep)s)
ON CONFLICT (channel) DO UPDATE
SET keep = excluded.keep
WHERE known.keep <> excluded.keep;

-- :name registered_channels
SELECT channel AS name, kind, shards, keep
FROM {schema}.channels
ORDER BY channel;

-- :name lock_channel
-- Retention and the registration of a consumer exclude each other by this row.
SELECT
FROM {schema}.channels
WHERE channel = %(channel)s
FOR UPDATE;

-- :name register_consumer
-- `earliest` is where the journal begins: older records are gone for everyone.
INSERT INTO {schema}.checkpoints (consumer, channel, shard, "offset", epoch)
SELECT %(consumer)s, %(channel)s, s.shard,
       CASE WHEN %(latest)s THEN journal.last_offset ELSE journal.first_offset - 1 END,
       (SELECT max(epoch) FROM {schema}.epochs)
FROM unnest(%(shards)s::int[]) AS s (shard),
     LATERAL {schema}.journal_bounds(%(channel)s, s.shard) AS journal
ON CONFLICT (consumer, channel, shard) DO NOTHING;
