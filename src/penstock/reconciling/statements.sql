-- :name hold_sequencers
-- Others that tick wait here for our tick to commit, and then find themselves second.  Taken before the snapshot, so that
-- no tick can slip in between, however busy they are.  Producers do not touch this table.
LOCK TABLE {schema}.ticks IN SHARE ROW EXCLUSIVE MODE;

-- :name place_barrier
-- In the transaction of the cut's tick: what lies behind the barrier was given no offset before it stands.
INSERT INTO {schema}.barriers (consumer, channel, shard, "offset", run, expires_at)
SELECT %(consumer)s, %(channel)s, b.shard, b."offset", %(run)s, clock_timestamp() + make_interval(secs => %(seconds)s)
FROM unnest(%(shards)s::int[], %(offsets)s::bigint[]) AS b (shard, "offset");

-- :name keep_barrier
UPDATE {schema}.barriers
SET expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
WHERE run = %(run)s;

-- :name lift_barrier
-- And those of runs that have died.
DELETE FROM {schema}.barriers
WHERE run = %(run)s OR expires_at < clock_timestamp() - interval '1 hour';

-- :name standing
SELECT shard, "offset", halted
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s
ORDER BY shard;
