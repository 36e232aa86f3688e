-- :name checkpoints
-- All of them are stopped while the consumer, or its channel, is paused.
SELECT shard, "offset",
       halted IS NOT NULL
           OR EXISTS (
                  SELECT FROM {schema}.pauses
                  WHERE (kind, name) IN (('consumer', %(consumer)s), ('channel', %(channel)s))
              ) AS is_stopped
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s
ORDER BY shard;

-- :name is_paused
SELECT EXISTS (SELECT FROM {schema}.pauses WHERE (kind, name) IN (('consumer', %(consumer)s), ('channel', %(channel)s)));

-- :name former_names
-- Why a consumer has no checkpoints: whether its channel was retired; the name that the consumer has now.
SELECT c.channel IS NOT NULL, r.successor
FROM (SELECT) one
LEFT JOIN {schema}.retired_channels c ON c.channel = %(channel)s
LEFT JOIN {schema}.former_consumers r ON r.consumer = %(consumer)s;

-- :name take_checkpoints
-- The row lock is the mutual exclusion: the process that holds it works on the shard, others skip it.  The transaction's id
-- proves later that effects and checkpoint are in one transaction; the clock is the one that staged the records.  A barrier
-- stops the consumer at its offset: records that have been read were sequenced before any barrier that this statement does
-- not see yet.
-- Of a shard of a later generation, `unpassed_shard` has to be asked as well.
SELECT shard, "offset", halted,
       pg_current_xact_id()::text,
       (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,  -- is it the server that was compared with the log?
       (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
       (
           SELECT min(b."offset")
           FROM {schema}.barriers b
           WHERE b.consumer = c.consumer AND b.channel = c.channel AND b.shard = c.shard
             AND b."offset" >= c."offset"
             AND b.expires_at > clock_timestamp()
       ),
       dead > 0 AS has_letters,  -- never too low: what is dropped stays counted
       EXISTS (
           SELECT FROM {schema}.pauses WHERE (kind, name) IN (('consumer', %(consumer)s), ('channel', %(channel)s))
       ) AS is_paused,
       shard >= (SELECT shards FROM {schema}.channels WHERE channel = %(channel)s) AS is_later
FROM {schema}.checkpoints c
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = ANY (%(shards)s::integer[])
FOR UPDATE OF c SKIP LOCKED;

-- :name unpassed_shard
-- The first shard of an earlier generation that the consumer has not passed, and the end of its generation: what a key has
-- there comes before what it has from that end on.  Of records that have been read, this statement sees the tick that
-- sequenced them, and no later one adds to earlier generations.
WITH generations AS MATERIALIZED (
    SELECT g.number, sum(g.shards) OVER (ORDER BY g.number) AS "end"
    FROM {schema}.channels ch,
         unnest(ch.shards || ch.generations) WITH ORDINALITY AS g (shards, number)
    WHERE ch.channel = %(channel)s
)
SELECT o.shard, (SELECT min("end") FROM generations WHERE "end" > o.shard)::int
FROM {schema}.checkpoints o
CROSS JOIN LATERAL {schema}.journal_bounds(o.channel, o.shard) AS journal
WHERE o.consumer = %(consumer)s AND o.channel = %(channel)s
  AND o.shard < (SELECT "end" FROM generations ORDER BY number DESC OFFSET 1 LIMIT 1)
  AND o."offset" < journal.last_offset
ORDER BY o.shard
LIMIT 1;

-- :name advance_checkpoints
-- Qualified: with the schema of each function and operator, it needs no settings of its own, whatever the handler's are.
-- It is sent together with COMMIT.  If the handler has ended the transaction that the locks were taken in, "offset" becomes NULL, which
-- fails, so that nothing is committed.
-- Each array has an element a shard: joining them as rows takes Postgres twice as long.
UPDATE {schema}.checkpoints
SET "offset" = CASE
        WHEN pg_catalog.pg_current_xact_id() OPERATOR(pg_catalog.=) %(transaction)s::pg_catalog.xid8
             AND "offset" OPERATOR(pg_catalog.=)
                 (%(expected)s::bigint[])[pg_catalog.array_position(%(shards)s::integer[], shard)]
        THEN (%(offsets)s::bigint[])[pg_catalog.array_position(%(shards)s::integer[], shard)]
    END,
    applied = applied OPERATOR(pg_catalog.+)
              (%(applied)s::bigint[])[pg_catalog.array_position(%(shards)s::integer[], shard)],
    skipped = skipped OPERATOR(pg_catalog.+)
              (%(skipped)s::bigint[])[pg_catalog.array_position(%(shards)s::integer[], shard)],
    dead = dead OPERATOR(pg_catalog.+)
           (%(dead)s::bigint[])[pg_catalog.array_position(%(shards)s::integer[], shard)],
    waiting = NULL,
    updated_at = pg_catalog.clock_timestamp()
WHERE consumer OPERATOR(pg_catalog.=) %(consumer)s::pg_catalog.text
  AND channel OPERATOR(pg_catalog.=) %(channel)s::pg_catalog.text
  AND shard OPERATOR(pg_catalog.=) ANY (%(shards)s::integer[]);

-- :name count_failure
-- Counts a dead letter of a locked shard, and gives how many there are in a row: with nothing applied between them, in any
-- shard of the consumer.  What had been applied at a shard's last one says whether it still counts.
WITH now AS (
    SELECT coalesce(sum(applied), 0)::bigint AS applied
    FROM {schema}.checkpoints
    WHERE consumer = %(consumer)s AND channel = %(channel)s
), counted AS (
    UPDATE {schema}.checkpoints c
    SET dead_in_a_row = CASE WHEN c.applied_at_dead = now.applied THEN c.dead_in_a_row + 1 ELSE 1 END,
        applied_at_dead = now.applied
    FROM now
    WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s
    RETURNING c.dead_in_a_row
)
SELECT (SELECT dead_in_a_row FROM counted) + coalesce(sum(c.dead_in_a_row), 0)::bigint
FROM {schema}.checkpoints c, now
WHERE c.consumer = %(consumer)s AND c.channel = %(channel)s AND c.shard <> %(shard)s
  AND c.applied_at_dead = now.applied;

-- :name halt_failing
-- Halts the other shards in which nothing was applied since a dead letter, without those that a process works on: they halt
-- at their own next one.
WITH now AS (
    SELECT coalesce(sum(applied), 0)::bigint AS applied
    FROM {schema}.checkpoints
    WHERE consumer = %(consumer)s AND channel = %(channel)s
), failing AS MATERIALIZED (
    SELECT c.shard
    FROM {schema}.checkpoints c, now
    WHERE c.consumer = %(consumer)s AND c.channel = %(channel)s AND c.shard <> %(shard)s AND c.halted IS NULL
      AND c.dead_in_a_row > 0 AND c.applied_at_dead = now.applied
    FOR UPDATE OF c SKIP LOCKED
)
UPDATE {schema}.checkpoints
SET halted = %(reason)s, waiting = NULL, updated_at = clock_timestamp()
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard IN (SELECT shard FROM failing);

-- :name halt
UPDATE {schema}.checkpoints
SET halted = %(reason)s, waiting = NULL, updated_at = clock_timestamp()
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s;

-- :name note_waiting
-- The time is that of the first note since the checkpoint has moved.
UPDATE {schema}.checkpoints
SET waiting = %(reason)s, updated_at = CASE WHEN waiting IS NULL THEN clock_timestamp() ELSE updated_at END
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s;

-- :name journal_begins
-- And where it goes on behind an offset.
SELECT min(first_offset), min(first_offset) FILTER (WHERE first_offset > %(after)s)
FROM {schema}.journal
WHERE channel = %(channel)s AND shard = %(shard)s;

-- :name parked_keys
-- Keys that have a dead letter: later records of theirs wait behind it.  The index is on the key's hash, since a key may be
-- longer than an entry of an index.
-- A key that was in another shard before the number of shards was changed has its dead letters there.  The log of a source is
-- not registered here, and keeps its number of shards as long as a consumer elsewhere reads it.
SELECT DISTINCT key
FROM {schema}.dead_letters
WHERE consumer = %(consumer)s AND channel = %(channel)s
  AND shard = ANY (ARRAY(
          SELECT generate_series(
                     CASE WHEN EXISTS (SELECT FROM {schema}.channels WHERE channel = %(channel)s AND generations <> '{}')
                          THEN 0
                          ELSE %(shard)s::integer
                     END,
                     %(shard)s::integer
                 )
      ))
  AND hashtextextended(key, 0) = ANY (SELECT hashtextextended(k, 0) FROM unnest(%(keys)s::text[]) AS k)
  AND key = ANY (%(keys)s::text[]);

-- :name parked_records
-- Records in a range of offsets that wait behind a dead letter of their key, for a consumer whose process does not hold them.
WITH key_shards AS MATERIALIZED (  -- as of `parked_keys`
    SELECT generate_series(
               CASE WHEN EXISTS (SELECT FROM {schema}.channels WHERE channel = %(channel)s AND generations <> '{}')
                    THEN 0
                    ELSE %(shard)s::integer
               END,
               %(shard)s::integer
           ) AS shard
)
SELECT e.first_offset + n.position - 1 AS "offset", r.id, r.key, r.action, r.object,
       r.data::text,
       coalesce(r.headers::text, ''),
       (extract(epoch FROM r.created_at) * 1000000)::bigint
FROM {schema}.journal e,
LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r ON true  -- a look-up by id
WHERE EXISTS (
          SELECT FROM {schema}.dead_letters
          WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = ANY (SELECT shard FROM key_shards)
      )
  AND e.channel = %(channel)s AND e.shard = %(shard)s
  AND e.last_offset >= %(first)s AND e.first_offset <= %(last)s
  AND e.first_offset + n.position - 1 BETWEEN %(first)s AND %(last)s
  AND EXISTS (
          SELECT FROM {schema}.dead_letters d
          WHERE d.consumer = %(consumer)s AND d.channel = %(channel)s AND d.shard = ANY (ARRAY(SELECT shard FROM key_shards))
            AND hashtextextended(d.key, 0) = hashtextextended(r.key, 0)
            AND d.key = r.key
      )
ORDER BY 1;

-- :name note_later_records
-- Notes at dead letters which later record of their key is applied, the first one: a retry would then reverse the two.
UPDATE {schema}.dead_letters
SET later_shard = %(shard)s, later_offset = (%(offsets)s::bigint[])[array_position(%(keys)s::text[], key)]
WHERE EXISTS (SELECT FROM {schema}.dead_letters WHERE consumer = %(consumer)s AND channel = %(channel)s)
  AND consumer = %(consumer)s AND channel = %(channel)s
  AND shard = ANY (ARRAY(  -- as of `parked_keys`
          SELECT generate_series(
                     CASE WHEN EXISTS (SELECT FROM {schema}.channels WHERE channel = %(channel)s AND generations <> '{}')
                          THEN 0
                          ELSE %(shard)s::integer
                     END,
                     %(shard)s::integer
                 )
      ))
  AND hashtextextended(key, 0) = ANY (ARRAY(SELECT hashtextextended(k, 0) FROM unnest(%(keys)s::text[]) AS k))
  AND key = ANY (%(keys)s::text[])
  AND (shard < %(shard)s OR "offset" < (%(offsets)s::bigint[])[array_position(%(keys)s::text[], key)])
  AND later_offset = 0;

-- :name note_later_range
-- As `note_later_records`, for the records in a range of offsets, for a consumer whose process does not hold them.
WITH key_shards AS MATERIALIZED (  -- as of `parked_keys`
    SELECT generate_series(
               CASE WHEN EXISTS (SELECT FROM {schema}.channels WHERE channel = %(channel)s AND generations <> '{}')
                    THEN 0
                    ELSE %(shard)s::integer
               END,
               %(shard)s::integer
           ) AS shard
),
following AS (
    SELECT r.key, min(e.first_offset + n.position - 1) AS "offset"
    FROM {schema}.journal e,
    LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
    JOIN LATERAL (SELECT key FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r ON true  -- a look-up by id
    WHERE EXISTS (
              SELECT FROM {schema}.dead_letters
              WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = ANY (SELECT shard FROM key_shards)
                AND later_offset = 0
          )
      AND e.channel = %(channel)s AND e.shard = %(shard)s
      AND e.last_offset >= %(first)s AND e.first_offset <= %(last)s
      AND e.first_offset + n.position - 1 BETWEEN %(first)s AND %(last)s
    GROUP BY r.key
)
UPDATE {schema}.dead_letters d
SET later_shard = %(shard)s, later_offset = following."offset"
FROM following
WHERE d.consumer = %(consumer)s AND d.channel = %(channel)s AND d.shard = ANY (ARRAY(SELECT shard FROM key_shards))
  AND hashtextextended(d.key, 0) = hashtextextended(following.key, 0)
  AND d.key = following.key
  AND (d.shard < %(shard)s OR d."offset" < following."offset")
  AND d.later_offset = 0;

-- :name dead_letter_records
-- The payload is the staged row's while that is there: what came may be damaged, or nested so deep that Postgres can just store
-- it, and cannot parse it in a statement as large as this one.  Sources have their rows elsewhere.
INSERT INTO {schema}.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, headers,
                                   staged_at, reason, attempts, parked, later_offset)
SELECT %(consumer)s, %(channel)s, %(shard)s, r."offset", r.id, r.key, r.action, r.object,
       CASE WHEN s.id IS NULL THEN r.data::jsonb ELSE s.data END,
       CASE WHEN s.id IS NULL THEN nullif(r.headers, '')::jsonb ELSE s.headers END,
       to_timestamp(r.staged_us / 1000000.0), %(reason)s, %(attempts)s, %(parked)s, 0
FROM unnest(%(offsets)s::bigint[], %(ids)s::bigint[], %(keys)s::text[], %(actions)s::text[], %(objects)s::text[],
            %(data)s::text[], %(headers)s::text[], %(staged)s::bigint[])
    AS r ("offset", id, key, action, object, data, headers, staged_us)
LEFT JOIN LATERAL (
    SELECT id, data, headers
    FROM {schema}.staged_records
    WHERE id = r.id AND channel = %(channel)s AND (extract(epoch FROM created_at) * 1000000)::bigint = r.staged_us
    OFFSET 0  -- a look-up by id
) s ON true;

-- :name dead_letter_member
-- A member has no offset: its dead letter is numbered, in the transaction that holds the checkpoint.  One that fails
-- again keeps its letter.
WITH known AS (
    UPDATE {schema}.dead_letters
    SET reason = %(reason)s, attempts = attempts + %(attempts)s, failed_at = clock_timestamp()
    WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s
      AND hashtextextended(key, 0) = hashtextextended(%(key)s, 0) AND key = %(key)s
    RETURNING key
)
INSERT INTO {schema}.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at,
                                   reason, attempts)
SELECT %(consumer)s, %(channel)s, %(shard)s, coalesce(max("offset"), 0) + 1, 0, %(key)s, 'dirty', 'member', 'null',
       to_timestamp(%(since)s / 1000000.0), %(reason)s, %(attempts)s
FROM {schema}.dead_letters
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s
HAVING NOT EXISTS (SELECT FROM known);

-- :name forget_members
-- Members that are done now have no dead letter any more.
DELETE FROM {schema}.dead_letters
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s
  AND hashtextextended(key, 0) = ANY (SELECT hashtextextended(k, 0) FROM unnest(%(keys)s::text[]) AS k)
  AND key = ANY (%(keys)s::text[]);

-- :name finish_record
-- Begins a job's transaction: 0 if the record was finished before.  The row's lock makes a second worker wait for the first one's end.
-- The transaction's id proves later that the effects are in the same one.
-- A restored Postgres gives ids out again: a record of another time is another record, and another start another server.
-- Qualified: with the schema of each function and operator, it needs no settings of its own.
SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text,
       pg_catalog.cardinality(ARRAY(
           SELECT {schema}.finish_records(%(channel)s, ARRAY[%(id)s]::pg_catalog.int8[],
                                          ARRAY[%(staged_us)s]::pg_catalog.int8[])
       ))::pg_catalog.text,
       (extract(epoch FROM pg_catalog.pg_postmaster_start_time()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8::pg_catalog.text,
       (extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8::pg_catalog.text;

-- :name begin_jobs
-- Begins the transaction of several jobs: its id, and which server it is.  Qualified, as `finish_record`.
SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text,
       (extract(epoch FROM pg_catalog.pg_postmaster_start_time()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8::pg_catalog.text,
       (extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8::pg_catalog.text;

-- :name finish_together
-- Finishes the jobs of a transaction, after their effects.  Fails if it is not the transaction of the effects, or if one of the
-- jobs was finished or cancelled meanwhile.  Sent together with COMMIT.  Qualified, as `check_transaction`.
SELECT 1 OPERATOR(pg_catalog./) (
           coalesce(pg_catalog.pg_current_xact_id_if_assigned() OPERATOR(pg_catalog.=) %(transaction)s::pg_catalog.xid8, false)
           AND pg_catalog.cardinality(ARRAY(
                   SELECT {schema}.finish_records(%(channel)s, %(ids)s::pg_catalog.int8[], %(staged)s::pg_catalog.int8[])
               )) OPERATOR(pg_catalog.=) %(count)s
       )::pg_catalog.int4;

-- :name finish_jobs
-- Finishes jobs whose handlers have returned: a transaction of its own, whose time it returns, too.  A job that was finished or
-- cancelled before is missing.
SELECT {schema}.finish_records(%(channel)s, %(ids)s::bigint[], %(staged)s::bigint[]),
       (extract(epoch FROM now()) * 1000000)::bigint;

-- :name finish_jobs_with_results
-- As `finish_jobs`; writes the results of those of the jobs that have one, and are finished here.
WITH finished AS MATERIALIZED (
    SELECT {schema}.finish_records(%(channel)s, %(ids)s::bigint[], %(staged)s::bigint[]) AS id
), written AS (
    INSERT INTO {schema}.job_results (record_id, channel, result)
    SELECT id, %(channel)s, r.result::jsonb
    FROM finished
    JOIN unnest(%(with_results)s::bigint[], %(results)s::text[]) AS r (id, result) USING (id)
    ON CONFLICT (record_id) DO UPDATE
    SET channel = EXCLUDED.channel, result = EXCLUDED.result, done_at = EXCLUDED.done_at
)
SELECT id, (extract(epoch FROM now()) * 1000000)::bigint FROM finished;

-- :name outstanding_jobs
-- Those of the jobs that have been read which are neither finished nor cancelled.
SELECT r.id
FROM unnest(%(ids)s::bigint[], %(staged)s::bigint[]) AS j (id, staged_us),
LATERAL (SELECT id, channel, created_at FROM {schema}.staged_records WHERE id = j.id OFFSET 0) r  -- a look-up by id
WHERE r.channel = %(channel)s AND (extract(epoch FROM r.created_at) * 1000000)::bigint = j.staged_us;

-- :name cancelled
SELECT record_id
FROM {schema}.cancellations
WHERE record_id = ANY (%(ids)s::bigint[]);

-- :name note_no_effect
-- After the record is finished.  A cancellation that is not committed yet is waited for: it would hold that the job has its effect.
INSERT INTO {schema}.cancellations (record_id, channel, shard, has_no_effect)
VALUES (%(id)s, %(channel)s, %(shard)s, true)
ON CONFLICT (record_id) DO UPDATE
SET has_no_effect = true;

-- :name check_transaction
-- Qualified: with the schema of each function and operator, it needs no settings of its own, whatever the handler's are.
-- It is sent together with COMMIT, and fails if the handler has ended the transaction in which the record was finished.
SELECT 1 OPERATOR(pg_catalog./)
       coalesce(pg_catalog.pg_current_xact_id_if_assigned() OPERATOR(pg_catalog.=) %(transaction)s::pg_catalog.xid8,
                false)::pg_catalog.int4;

-- :name dead_letter_job
-- A job has no offset: its dead letter is at its id.  What is written is the record as it was staged, which this statement still
-- sees when the function has deleted it.  No row if the record was finished before, or cancelled: then the streamer finishes it.
WITH finished AS MATERIALIZED (
    SELECT {schema}.finish_records(%(channel)s, ARRAY(
               SELECT id
               FROM {schema}.staged_records
               WHERE id = %(id)s AND (extract(epoch FROM created_at) * 1000000)::bigint = %(staged_us)s
                 AND NOT EXISTS (SELECT FROM {schema}.cancellations WHERE record_id = %(id)s)
           )) AS id
)
INSERT INTO {schema}.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, headers,
                                   staged_at, reason, attempts)
SELECT %(consumer)s, r.channel, r.shard, r.id, r.id, r.key, r.action, r.object, r.data, r.headers,
       r.created_at, %(reason)s, %(attempts)s
FROM finished
JOIN {schema}.staged_records r USING (id);

-- :name write_result
INSERT INTO {schema}.job_results (record_id, channel, result)
VALUES (%(id)s, %(channel)s, %(result)s::jsonb)
ON CONFLICT (record_id) DO UPDATE
SET channel = EXCLUDED.channel, result = EXCLUDED.result, done_at = EXCLUDED.done_at;

-- :name note_jobs
-- In the order of their ids: two workers with notes on the same jobs lock the rows in one order.  The last twenty attempts are kept.
INSERT INTO {schema}.job_notes AS known (record_id, channel, attempts, progress, note)
SELECT n.record_id, %(channel)s, n.attempts, n.progress, n.note
FROM jsonb_to_recordset(%(notes)s::jsonb) AS n (record_id bigint, attempts jsonb, progress real, note text)
ORDER BY n.record_id
ON CONFLICT (record_id) DO UPDATE
SET attempts = jsonb_path_query_array(known.attempts || EXCLUDED.attempts, '$[last - 19 to last]'),
    progress = coalesce(EXCLUDED.progress, known.progress),
    note = coalesce(EXCLUDED.note, known.note),
    noted_at = EXCLUDED.noted_at;

-- :name done_up_to
-- The offset before the first record of a queue that is not done, among the next ones behind a checkpoint.
WITH following AS (
    SELECT j.first_offset + n.position - 1 AS "offset", n.id
    FROM {schema}.journal j,
    LATERAL unnest(j.record_ids) WITH ORDINALITY AS n (id, position)
    WHERE j.channel = %(channel)s AND j.shard = %(shard)s
      AND j.last_offset > %(after)s AND j.first_offset <= %(after)s::bigint + %(records)s
      AND j.first_offset + n.position - 1 BETWEEN %(after)s + 1 AND %(after)s::bigint + %(records)s
)
SELECT coalesce(
           (SELECT min("offset") - 1 FROM following JOIN {schema}.staged_records r USING (id)),
           (SELECT max("offset") FROM following)
       );

-- :name lock_dead_letter
-- With its payload, the first later record of its key that was applied, and the first dead letter of its key before this one.
-- That one's shard was another before the number of shards was changed: newer shards have higher numbers.
SELECT d.record_id, d.key, d.action, d.object, d.data::text, coalesce(d.headers::text, ''),
       (extract(epoch FROM d.staged_at) * 1000000)::bigint,
       d.later_shard, d.later_offset, earlier.shard, earlier."offset"
FROM {schema}.dead_letters d
LEFT JOIN LATERAL (
    SELECT shard, "offset"
    FROM (
        SELECT e.shard, e."offset"
        FROM {schema}.dead_letters e
        WHERE e.consumer = d.consumer AND e.channel = d.channel
          AND e.shard = ANY (ARRAY(SELECT generate_series(
                  CASE WHEN EXISTS (SELECT FROM {schema}.channels WHERE channel = %(channel)s AND generations <> '{}')
                       THEN 0
                       ELSE %(shard)s::integer
                  END,
                  %(shard)s::integer
              )))
          AND hashtextextended(e.key, 0) = hashtextextended(d.key, 0) AND e.key = d.key
        OFFSET 0  -- a look-up by key, not a walk in this order
    ) of_key
    WHERE shard < d.shard OR "offset" < d."offset"
    ORDER BY shard, "offset"
    LIMIT 1
) earlier ON true
WHERE d.consumer = %(consumer)s AND d.channel = %(channel)s AND d.shard = %(shard)s AND d."offset" = %(offset)s
FOR UPDATE OF d;

-- :name stage_again
-- A dead letter of a queue as a new record of its tenant.  Its times are over: it is due now, and has no deadline.  Its unique name is its
-- own again as soon as no other has it, `again`; one that it had for a time, it has had.
INSERT INTO {schema}.staged_records (channel, shard, key, action, object, data, headers)
SELECT channel, shard, key, action, object, data,
       CASE
           WHEN headers #>> '{penstock,unique,until}' = 'window' THEN headers #- '{penstock,unique}'
           WHEN headers #>> '{penstock,unique,name}' IS NOT NULL THEN jsonb_set(headers, '{penstock,again}', 'true')
           ELSE headers
       END #- '{penstock,due}' #- '{penstock,delay_ms}' #- '{penstock,deadline}'
FROM {schema}.dead_letters
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s AND "offset" = %(offset)s;

-- :name remove_dead_letter
DELETE FROM {schema}.dead_letters
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s AND "offset" = %(offset)s;

-- :name failed_again
UPDATE {schema}.dead_letters
SET reason = %(reason)s, attempts = attempts + 1, failed_at = clock_timestamp(), retry_requested_at = NULL
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s AND "offset" = %(offset)s;

-- :name request_retries
-- A worker of the consumer takes them up.
UPDATE {schema}.dead_letters d
SET retry_requested_at = clock_timestamp()
FROM unnest(%(consumers)s::text[], %(channels)s::text[], %(shards)s::integer[], %(offsets)s::bigint[])
     AS wanted (consumer, channel, shard, "offset")
WHERE d.consumer = wanted.consumer AND d.channel = wanted.channel AND d.shard = wanted.shard AND d."offset" = wanted."offset";

-- :name retries_requested
-- Whether there is something to take; asked every few seconds, and answered by an index that is empty.  Of a queue, its worker takes
-- those of workers with other names, too: it may have been renamed.
SELECT EXISTS (
           SELECT FROM {schema}.dead_letters
           WHERE (consumer = %(consumer)s OR %(of_any)s) AND channel = %(channel)s AND retry_requested_at IS NOT NULL
       );

-- :name take_requested_retries
-- The oldest first, a few at a time.  Not while the consumer is paused: the request waits.
UPDATE {schema}.dead_letters d
SET retry_requested_at = NULL
FROM (
    SELECT l.consumer, l.channel, l.shard, l."offset", coalesce(c.kind, 'log') = 'log' AS is_ordered
    FROM {schema}.dead_letters l
    LEFT JOIN {schema}.channels c USING (channel)
    WHERE (l.consumer = %(consumer)s OR %(of_any)s) AND l.channel = %(channel)s AND l.retry_requested_at IS NOT NULL
      AND NOT EXISTS (
              SELECT FROM {schema}.pauses
              WHERE (kind, name) IN (('consumer', %(consumer)s), ('channel', %(channel)s))
          )
    ORDER BY l.shard, l."offset"
    LIMIT 10
    FOR UPDATE OF l SKIP LOCKED
) taken
WHERE d.consumer = taken.consumer AND d.channel = taken.channel AND d.shard = taken.shard AND d."offset" = taken."offset"
RETURNING d.consumer, d.channel, d.shard, d."offset", d.record_id, d.key, d.action, d.object, d.staged_at, d.reason, d.attempts,
          d.parked, d.failed_at, d.later_shard, CASE WHEN is_ordered THEN d.later_offset ELSE 0 END;
