-- :name halted_shards
SELECT consumer, channel, shard, halted
FROM {schema}.checkpoints
WHERE halted IS NOT NULL AND consumer = ANY (%(consumers)s)
ORDER BY consumer, channel, shard;

-- :name dead_letters_written
SELECT consumer, channel, shard, "offset", key, action, object, attempts, reason
FROM {schema}.dead_letters
ORDER BY consumer, channel, shard, "offset";

-- :name application_tables
-- Tables of the application, with the columns that the database does not number.
SELECT n.nspname, c.relname, array_agg(a.attname ORDER BY a.attnum)
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND (n.nspname = 'public' OR n.nspname = ANY (%(also)s))
  AND a.attidentity = ''
  AND coalesce(pg_catalog.pg_get_expr(d.adbin, d.adrelid), '') NOT LIKE 'nextval(%%'
GROUP BY 1, 2
ORDER BY 1, 2;
