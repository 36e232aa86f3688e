-- :name halted_shards
SELECT consumer, channel, shard, halted
FROM {schema}.checkpoints
WHERE halted IS NOT NULL AND consumer = ANY (%(consumers)s)
ORDER BY consumer, channel, shard;

-- :name dead_letters_written
SELECT consumer, channel, shard, "offset", key, action, object, attempts, reason
FROM {schema}.dead_letters
ORDER BY consumer, channel, shard, "offset";
