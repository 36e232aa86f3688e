-- :name settings
SELECT name, setting
FROM pg_settings
WHERE name = ANY (%(names)s);

-- :name transaction_ids
SELECT age(datfrozenxid)
FROM pg_database
WHERE datname = current_database();

-- :name long_transactions
-- Their own records wait, and vacuum keeps the rows that they may still see.
SELECT pid, coalesce(application_name, ''), state, extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
  AND clock_timestamp() - xact_start > make_interval(secs => %(longer_s)s)
ORDER BY xact_start
LIMIT 5;

-- :name prepared_transactions
SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8
FROM pg_prepared_xacts
WHERE database = current_database() AND clock_timestamp() - prepared > make_interval(secs => %(longer_s)s)
ORDER BY prepared
LIMIT 5;

-- :name sees_others
-- Without it, `pg_stat_activity` hides when the transactions of other roles began.
SELECT pg_has_role('pg_read_all_stats', 'USAGE');

-- :name group_roles
SELECT rolname
FROM pg_roles
WHERE NOT rolcanlogin AND right(rolname, length(%(ending)s::text)) = %(ending)s::text
ORDER BY rolname;

-- :name highest_id
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence(%(table)s, 'id')::regclass), 0),
       coalesce((SELECT max(last_offset) FROM {schema}.journal), 0);

-- :name holes
-- Journal rows whose first offset does not follow the previous row's last.
SELECT channel, shard, count(*), min(first_offset)
FROM (
    SELECT channel, shard, first_offset,
           lag(last_offset) OVER (PARTITION BY channel, shard ORDER BY first_offset) AS before
    FROM {schema}.journal
) entries
WHERE first_offset <> before + 1
GROUP BY channel, shard;

-- :name missing_records
-- Records that the newest and the oldest journal rows name and that do not exist; in a queue, such a one is done.
WITH sample AS (
    (SELECT channel, record_ids FROM {schema}.journal ORDER BY created_at DESC LIMIT %(entries)s)
    UNION ALL
    (SELECT channel, record_ids FROM {schema}.journal ORDER BY created_at LIMIT %(entries)s)
),
named AS (
    SELECT DISTINCT unnest(record_ids) AS id
    FROM sample
    WHERE channel NOT IN (SELECT channel FROM {schema}.channels WHERE kind = 'queue')
)
SELECT count(*), min(id)
FROM named
WHERE NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = named.id);

-- :name retired_channels
SELECT channel
FROM {schema}.retired_channels;
