"""The SQL of a capturing function, with places for the parts of its rule."""

QUOTE = "$penstock$"

# It has no percent sign: Alembic doubles them when it prints SQL.
FUNCTION = """CREATE OR REPLACE FUNCTION {function}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET intervalstyle = 'iso_8601'
SET extra_float_digits = 1
SET datestyle = 'ISO, YMD'
SET timezone = 'UTC'
SET standard_conforming_strings = on
AS $penstock$
DECLARE
    penstock_row record;
    penstock_key text;
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'restrict_violation',
            MESSAGE = 'penstock: TRUNCATE of ' || TG_TABLE_NAME || ' would remove rows without staging them; use DELETE';
    ELSIF TG_OP = 'DELETE' THEN
        penstock_row := OLD;
    ELSIF TG_OP = 'UPDATE' AND OLD *= NEW THEN
        RETURN NULL;
    ELSE
        penstock_row := NEW;
    END IF;
{when}    penstock_key := {key};
{old_member}    IF penstock_key IS NULL OR {length}(penstock_key) NOT BETWEEN 1 AND {limit} THEN
        RAISE EXCEPTION USING
            ERRCODE = 'check_violation',
            MESSAGE = 'penstock: the {part} of a row of ' || TG_TABLE_NAME
                || ' is NULL, empty or longer than {limit} {unit}';
    END IF;
    INSERT INTO {staged} (channel, shard, key, action, object, data, headers)
    VALUES (
        {channel},
        mod(('x' || encode(substr(sha256(convert_to(penstock_key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, {shards}),
        penstock_key,
        lower(TG_OP),
        {object},
        {payload},
        {headers}
    );
    RETURN NULL;
END
$penstock$"""


# An update that changes the member marks the old one too; NULL marks nothing.
OLD_MEMBER = """    IF TG_OP = 'UPDATE' AND {old_key} IS DISTINCT FROM penstock_key AND {old_key} IS NOT NULL THEN
        INSERT INTO {staged} (channel, shard, key, action, object, data)
        VALUES (
            {channel},
            mod(('x' || encode(substr(sha256(convert_to({old_key}, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, {shards}),
            {old_key},
            lower(TG_OP),
            {object},
            '{{}}'
        );
    END IF;
    IF penstock_key IS NULL THEN
        RETURN NULL;
    END IF;
"""
