"""Checks what this login may do in Postgres, and prints what it takes to do the rest."""

from collections.abc import Iterator, Mapping

from penstock.database.statements import quote, statements
from penstock.operating.doctor.check import Check, CheckContext, CheckResult
from penstock.schema.roles import Right, RoleName, describe, grant_sql, lacking, rights, working_rights

_WORK: Mapping[RoleName, str] = {"producer": "stage", "streamer": "stream", "consumer": "consume", "viewer": "view"}

_SET_BY_POSTGRES = ("created_at", "xid")
_SEE_ROLES = "penstock init --roles shows what to revoke"

Missing = dict[RoleName, list[Right]]


def privileges(context: CheckContext) -> Iterator[CheckResult]:
    """This login has all privileges of each work that it has some of."""
    login = context.connection.info.user
    missing: Missing = {role: lacking(context.connection, context.scope, _needed(role)) for role in _WORK}
    complete = [role for role in _WORK if not missing[role]]
    partial = _find_partial(missing, complete)
    if not complete and not partial:
        partial = [min(_WORK, key=lambda role: len(missing[role]))]
    for role in partial:
        yield CheckResult.warning(
            "privileges",
            f"{login} lacks some of what it takes to {_WORK[role]}: {describe(missing[role])}",
            _make_grants(context, role, missing[role], login),
        )
    surplus = [] if len(complete) == len(_WORK) else _find_surplus(context)
    if surplus:
        yield CheckResult.warning(
            "privileges",
            f"{login} may set columns of staged records that order them or hide them: {describe(surplus)}",
            _SEE_ROLES,
        )
    if not partial and not surplus:
        able = ", ".join(_WORK[role] for role in complete)
        yield CheckResult.ok("privileges", f"{login} has what it takes to {able}")


def _needed(role: RoleName) -> frozenset[Right]:
    return rights(role) if role == "viewer" else working_rights(role)


def _find_surplus(context: CheckContext) -> list[Right]:
    """Columns of staged records that only Postgres should set, and that this login may set."""
    columns = [Right("TABLE", "staged_records", "INSERT", name) for name in _SET_BY_POSTGRES]
    missing = lacking(context.connection, context.scope, columns)
    return [right for right in columns if right not in missing]


def _find_partial(missing: Missing, complete: list[RoleName]) -> list[RoleName]:
    """Works that the login has privileges for which no work that it may do explains.

    By tables alone: everyone may call functions unless that was revoked.
    """
    explained = frozenset[Right]().union(*(rights(role) for role in complete))
    held = {role: _needed(role) - set(missing[role]) for role in missing if missing[role]}
    unexplained = {role: {r for r in held[role] - explained if r.kind == "TABLE"} for role in held}
    most = max(map(len, unexplained.values()), default=0)
    return [role for role, found in unexplained.items() if found and len(found) == most]


def _make_grants(context: CheckContext, role: RoleName, missing: list[Right], login: str) -> str:
    """The group role, if the database has one for this work; else the privileges one by one."""
    candidates = context.connection.execute(
        statements(__package__, context.scope.schema)["group_roles"], {"ending": f"_{role}"}
    ).fetchall()
    for (group,) in candidates:
        if not lacking(context.connection, context.scope, _needed(role), group):
            return f"GRANT {quote(group)} TO {quote(login)};"
    return " ".join(f"{grant};" for grant in grant_sql(missing, context.scope.schema, login))


CHECKS: tuple[Check, ...] = (privileges,)
