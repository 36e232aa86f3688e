-- :name register_channel
INSERT INTO {schema}.channels AS known (channel, kind, shards, keep)
VALUES (%(channel)s, %(kind)s, %(shards)s, %(keep)s)
ON CONFLICT (channel) DO UPDATE
SET keep = excluded.keep
WHERE known.keep <> excluded.keep;

-- :name channel
SELECT kind, shards, keep
FROM {schema}.channels
WHERE channel = %(channel)s;

-- :name lock_channel
-- Retention and the registration of a consumer exclude each other by this row.
SELECT
FROM {schema}.channels
WHERE channel = %(channel)s
FOR UPDATE;

-- :name register_consumer
-- `earliest` is where the journal begins: what is older is gone for everyone.
INSERT INTO {schema}.checkpoints (consumer, channel, shard, "offset", epoch)
SELECT %(consumer)s, %(channel)s, s.shard,
       CASE WHEN %(latest)s THEN coalesce(max(j.last_offset), 0)
            ELSE coalesce(min(j.first_offset), 1) - 1
       END,
       (SELECT max(epoch) FROM {schema}.epochs)
FROM unnest(%(shards)s::int[]) AS s (shard)
LEFT JOIN {schema}.journal j ON j.channel = %(channel)s AND j.shard = s.shard
GROUP BY s.shard
ON CONFLICT (consumer, channel, shard) DO NOTHING;
