"""The function that a rule's triggers call: its parts, which ``triggers`` puts together.

It has the row that a statement wrote, but the statement's triggers fire when all of its rows are
written, one row after the other.  So a record may be written when the row has changed again, or its
key belongs to another row: then the function reads the row that is there.  It follows DDL, since a
session that has planned its expressions for other types plans them again.

No part has a percent sign: Alembic doubles them when it prints SQL.
"""

# What a session has planned for the row's types of before fails after ALTER TABLE: it plans once
# again.  A subtransaction that writes nothing takes no id.
FUNCTION = """CREATE OR REPLACE FUNCTION {function}() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET intervalstyle = 'iso_8601'
SET extra_float_digits = 1
SET datestyle = 'ISO, YMD'
SET timezone = 'UTC'
SET standard_conforming_strings = on
AS $penstock$
#variable_conflict use_column
DECLARE
    penstock_row record;
    penstock_new record;
    penstock_key text;
    penstock_old text;
    penstock_data jsonb;
    penstock_headers jsonb;
    penstock_action text := lower(TG_OP);
    penstock_is_planned boolean := false;
    penstock_is_moved boolean := false;
    penstock_is_there boolean := false;
    penstock_is_gone boolean := false;
BEGIN
    IF TG_OP = 'TRUNCATE' AND current_setting('penstock.truncate', true) = 'allow' THEN
        RETURN NULL;
    ELSIF TG_OP = 'TRUNCATE' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'restrict_violation',
            MESSAGE = 'penstock: TRUNCATE of ' || TG_TABLE_NAME || ' would remove rows without staging them; use DELETE';
    ELSIF TG_OP = 'DELETE' THEN
        penstock_row := OLD;
{taken}    ELSIF TG_OP = 'UPDATE' AND OLD *= NEW THEN
        RETURN NULL;
    ELSE
        penstock_row := NEW;
{current}    END IF;
{nested}    LOOP
        BEGIN
{change}{gone}{when}            penstock_key := {key};
            penstock_data := {payload};
            penstock_headers := {headers};
        EXCEPTION WHEN datatype_mismatch OR undefined_column OR undefined_function OR cannot_coerce THEN
            IF penstock_is_planned THEN
                RAISE EXCEPTION USING
                    ERRCODE = SQLSTATE,
                    MESSAGE = 'penstock: ' || SQLERRM,
                    DETAIL = 'The columns of ' || TG_TABLE_NAME || ' are not those that the staging rule reads.',
                    HINT = 'Change the rule, then: penstock init';
            END IF;
            penstock_is_planned := true;
            EXECUTE 'DISCARD PLANS';
            CONTINUE;
        END;
{old_member}        IF penstock_key IS NULL OR {length}(penstock_key) NOT BETWEEN 1 AND {limit} THEN
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
            penstock_action,
            {object},
            penstock_data,
            penstock_headers
        );
{next_image}        RETURN NULL;
    END LOOP;
END
$penstock$"""  # noqa: E501  SQL


# A trigger of the application's may write rows of the statement whose records are still to come.
# The record of that is there first, so that these have the row as it is now; if it is gone, what is
# left is the delete of the key that it had before.  ``xmax`` is not 0 if it was written, or locked.
CURRENT = """        IF NEW.xmax <> 0 AND current_setting('penstock.nested', true) = 'on' THEN
            EXECUTE {find_new} INTO penstock_row USING NEW;
            IF penstock_row IS NULL THEN
                penstock_row := NEW;
                penstock_is_gone := true;
            END IF;
        END IF;
"""

GONE = """            IF penstock_is_gone AND penstock_action <> 'delete' THEN
                RETURN NULL;
            END IF;
"""

# The trigger has inserted another row of the key; or the transaction has, where the constraint is
# deferrable.
TAKEN = """        IF {is_possible} THEN
            EXECUTE {find_old} INTO penstock_is_there USING OLD;
            IF penstock_is_there THEN
                RETURN NULL;
            END IF;
        END IF;
"""

NESTED = """    IF pg_trigger_depth() > 1 THEN
        PERFORM set_config('penstock.nested', 'on', true);
    END IF;
"""

FIND = (
    "'SELECT {what} FROM ' || coalesce(pg_partition_root(TG_RELID), TG_RELID)::regclass || {where}"
)

# An update that changes the key: the old row is deleted, and the new one inserted.  If several rows
# may have a key, copies tell them apart by the primary key, which counts as well.
KEY_CHANGE = """            IF TG_OP = 'UPDATE' AND NOT penstock_is_moved THEN
                penstock_old := {old_key};
                penstock_key := {key};
                IF ({moves}) AND length(penstock_old) BETWEEN 1 AND {limit} THEN
{moved}
                    penstock_is_moved := true;
                END IF;
            END IF;
"""

OLD_IMAGE = """{taken}                    IF penstock_is_there THEN
                        penstock_action := '{action}';
                    ELSE
                        penstock_new := penstock_row;
                        penstock_action := 'delete';
                        penstock_row := OLD;
                    END IF;"""

NEXT_IMAGE = """        IF penstock_is_moved AND penstock_action = 'delete' THEN
            penstock_action := '{action}';
            penstock_row := penstock_new;
            CONTINUE;
        END IF;
"""

# An update that changes the member marks the old one too; NULL marks nothing.
MEMBER_CHANGE = """            IF TG_OP = 'UPDATE' THEN
                penstock_old := {old_key};
            END IF;
"""

OLD_MEMBER = """        IF penstock_old <> penstock_key OR penstock_key IS NULL AND penstock_old IS NOT NULL THEN
            INSERT INTO {staged} (channel, shard, key, action, object, data)
            VALUES (
                {channel},
                mod(('x' || encode(substr(sha256(convert_to(penstock_old, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, {shards}),
                penstock_old,
                penstock_action,
                {object},
                '{{}}'
            );
        END IF;
        IF penstock_key IS NULL THEN
            RETURN NULL;
        END IF;
"""  # noqa: E501  SQL
